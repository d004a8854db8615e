// More than two evaluations: each compared with the first in one metric, and all metrics of all runs.

import { ask } from "./api.js";
import { whisker } from "./charts.js";
import { h, replace } from "./dom.js";
import { between, correctedFor, count, number, plural, signed } from "./format.js";
import { aggregatesTable } from "./run_cards.js";
import { card } from "./table.js";

// The choice of the compared metric.
export function metricChoice(found, context, change) {
  return h(
    "label.metric-choice",
    {},
    h("span.muted", {}, "Metric"),
    h(
      "select",
      {
        onchange: (event) =>
          change({ metric: event.target.value === "reward" ? null : event.target.value, start: null }),
      },
      found.metric_names.map((name) => h("option", { value: name, selected: name === found.metric }, name)),
    ),
  );
}

export async function tablePage(context, ids) {
  const { root } = context;
  context.crumbs([[`compare ${ids.length} runs`, null]]);
  await draw();

  async function draw() {
    const found = await ask("compare", { runs: ids.join(","), metric: context.query.metric });
    replace(root, manyHead(found, context, draw), card(null, manyTable(found, ids)), metricsTable(found), aggregates(found));
  }

  context.keys([["Escape u", "back to the runs", () => context.go("#/")]]);
}

function manyHead(found, context, draw) {
  const change = (changes) => (context.update(changes), draw());
  return [
    h(
      "header.page-head",
      {},
      h(
        "div",
        {},
        h("h1", {}, plural(found.runs.length, "run")),
        h("p.muted", {}, "Each run is compared with the first by example; verdicts are corrected for the number of comparisons."),
      ),
      metricChoice(found, context, change),
    ),
  ];
}

function manyTable(found, ids) {
  const figureOf = (row) => row.figures.find((figure) => figure.name === found.metric);
  const all = found.rows.map(figureOf);
  const most = Math.max(1, ...all.map((figure) => figure.high ?? figure.mean ?? 0));
  const least = Math.min(0, ...all.map((figure) => figure.low ?? figure.mean ?? 0));
  const row = (item, i) => {
    const run = found.runs[i];
    const figure = figureOf(item);
    const against = item.against_first;
    const first = (id) => `#/compare/${[id, ...ids.filter((other) => other !== id)].join("/")}`;
    return h(
      "tr",
      {},
      h(
        "td",
        {},
        h("a.run-name", { href: `#/run/${run.id}` }, h("b", {}, run.model || run.name)),
        h("div.muted", {}, `${run.env_id} · ${run.name}`),
      ),
      h("td.figure", {}, h("b", {}, number(figure.mean)), h("div.muted", {}, between(figure.low, figure.high))),
      h("td.whisker-cell", {}, whisker({ ...figure, least, most })),
      against
        ? [
            h(
              "td.figure",
              { "data-name": "difference" },
              signed(against.difference),
              h("div.muted", {}, against.low === null ? "" : `${signed(against.low)} to ${signed(against.high)}`),
            ),
            h(
              "td",
              { class: against.verdict === "better" ? "good-text" : against.verdict === "worse" ? "bad-text" : "" },
              item.refusal ? h("span.muted", {}, `No verdict: ${item.refusal}`) : item.verdict,
              against.adjusted_p === null
                ? null
                : h("div.muted", {}, `p = ${number(against.adjusted_p)}${correctedFor(against.metrics)}`),
            ),
            h("td.figure", { "data-name": "won / lost" }, `${count(item.won)} / ${count(item.lost)}`),
            h(
              "td.wide",
              {},
              h("a.button", { href: `#/compare/${ids[0]}/${run.id}` }, "Examples"),
              " ",
              h("a.button", { href: first(run.id) }, "Make first"),
            ),
          ]
        : h("td", { colspan: 4 }, h("span.muted", {}, "the others are compared with this one")),
    );
  };
  const names = ["run", found.metric, "", "difference", "verdict", "won / lost", ""];
  return h(
    "div.scroll-box",
    {},
    h(
      "table.small.many.blocks",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          names.map((name, i) => h("th", { class: [1, 3, 5].includes(i) ? "figure" : "" }, name)),
        ),
      ),
      h("tbody", {}, found.rows.map(row)),
    ),
  );
}

function metricsTable(found) {
  if (found.metric_names.length < 2) return null;
  const heads = found.runs.map((run) => run.model || run.name);
  const cell = (figure, i) =>
    h(
      "td.figure",
      { "data-name": heads[i] },
      number(figure.mean),
      figure.low === null ? null : h("div.muted", {}, between(figure.low, figure.high)),
    );
  return card(
    "Every metric, with its 95% interval",
    h(
      "div.scroll-box",
      {},
      h(
        "table.small.many.stacked",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "metric"),
            heads.map((head) => h("th.figure", {}, head)),
          ),
        ),
        h(
          "tbody",
          {},
          found.metric_names.map((name, i) =>
            h(
              "tr",
              {},
              h("td.word", {}, name),
              found.rows.map((row, place) => cell(row.figures[i], place)),
            ),
          ),
        ),
      ),
    ),
  );
}

function aggregates(found) {
  if (!found.runs.some((run) => run.aggregates.length)) return null;
  const heads = found.runs.map((run) => run.model || run.name);
  return card("Aggregate metrics, with their 95% intervals", aggregatesTable(heads, found.runs));
}
