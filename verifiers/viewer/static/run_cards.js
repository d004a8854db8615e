// The cards above the table of a run, which show its metrics and filter the table.

import { barList, histogramChart, whisker } from "./charts.js";
import { h, icon, replace } from "./dom.js";
import { between, compact, count, duration, money, number, percent, plainJson, plural, shortNumber } from "./format.js";
import { card, tile, withoutRollouts } from "./table.js";

export function runTiles(about, known) {
  const reward = known.figures.find((figure) => figure.name === "reward");
  const range =
    reward.low === null ? (about.is_live ? "no interval yet" : "no interval") : `95% interval ${number(reward.low)} to ${number(reward.high)}`;
  const best = known.pass_at_k.at(-1);
  const ends = known.mean_with_failures;
  const failures = ends ? `; with them it could be ${number(ends[0])} to ${number(ends[1])}` : "";
  const few = best?.left_out
    ? ` of ${count(best.examples)} in ${plural(best.examples + best.left_out, "example")}`
    : "";
  const tokens = about.usage.prompt_tokens + about.usage.completion_tokens;
  return h(
    "div.tiles",
    {},
    tile("mean reward", number(reward.mean), range, "main"),
    tile("rollouts", count(about.rollouts), `of ${plural(about.examples, "example")}`),
    tile(
      "failed",
      count(about.failed),
      about.failed ? `${percent(about.failed / about.rollouts)}, not in the mean${failures}` : "none",
      about.failed ? "bad" : "",
    ),
    best && best.k > 1 ? tile(`pass@${best.k}`, number(best.mean), `pass^${best.k} ${number(best.all)}${few}`) : null,
    about.truncated
      ? tile(
          "cut off",
          count(about.truncated),
          `${percent(about.truncated / about.rollouts)} at the token limit`,
          "warn",
        )
      : null,
    known.time_ms
      ? tile("time", duration(known.time_ms.median), `median; 95% within ${duration(known.time_ms.p95)}`)
      : null,
    tokens
      ? tile(
          "tokens",
          compact(tokens),
          about.usage.cost_usd === null
            ? `${compact(about.usage.completion_tokens)} written`
            : money(about.usage.cost_usd),
        )
      : null,
  );
}

export function distributionCard(context, about, known, change) {
  const shown = known.figures.find((figure) => figure.name === context.query.show);
  if (shown?.histogram.length && shown.name !== "reward")
    return card(`Distribution of ${shown.name}`, histogramChart(shown.histogram, { mark: shown.name }));
  if (!known.histogram.length)
    return card(
      "Rewards",
      h("p.muted", {}, about.rollouts ? "No rollout has a reward." : withoutRollouts(about)),
    );
  const { low, high } = context.query;
  const isPicked = (bin) => low !== undefined && Number(low) === bin.low && Number(high) === bin.high;
  const onPick = (bin) =>
    change(
      isPicked(bin)
        ? { low: null, high: null, start: null }
        : { low: String(bin.low), high: String(bin.high), start: null },
    );
  return card(
    "Rewards",
    histogramChart(known.histogram, { onPick, isPicked }),
    known.by_task.length ? byTask(known.by_task, change) : null,
  );
}

function byTask(tasks, change) {
  const row = (item) =>
    h(
      "tr",
      {},
      h(
        "td.word",
        {},
        h("button.link", { onclick: () => change({ task: item.task, start: null }) }, item.task || "none given"),
      ),
      h("td.figure", {}, number(item.mean)),
      h("td.whisker-cell", {}, whisker({ ...item, least: 0, most: 1 })),
      h("td.figure.muted", {}, count(item.n)),
    );
  return h(
    "table.small",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["task", "mean", "", "n"].map((name) => h("th", {}, name)),
      ),
    ),
    h("tbody", {}, tasks.map(row)),
  );
}

export function metricsCard(context, about, known, change) {
  const isShown = (figure) => figure.name === (context.query.show ?? "reward");
  const show = (figure) => change({ show: figure.name === "reward" || isShown(figure) ? null : figure.name });
  const name = (figure) =>
    h(
      "button.link",
      {
        class: isShown(figure) ? "active" : "",
        onclick: () => show(figure),
        title: `show the distribution of ${figure.name}`,
      },
      figure.name,
    );
  const row = (figure) =>
    h(
      "tr",
      {},
      h("td.word", {}, name(figure)),
      h("td.figure", {}, number(figure.mean)),
      h("td.whisker-cell", {}, whisker(figure)),
      h("td.figure.muted", {}, between(figure.low, figure.high)),
    );
  return card(
    "Reward and metrics",
    h(
      "table.small.metrics",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["", "mean", "", "95% interval"].map((name) => h("th", {}, name)),
        ),
      ),
      h("tbody", {}, known.figures.map(row)),
    ),
    about.aggregates.length ? [h("h2", {}, "Aggregate metrics"), aggregatesTable(["value"], [about])] : null,
  );
}

// Saved aggregate metrics (balanced accuracy, F1, …) of one run or of several side by side.
export function aggregatesTable(heads, runs) {
  const names = [...new Set(runs.flatMap((run) => run.aggregates.map((figure) => figure.name)))];
  const cell = (figure, i) =>
    h(
      "td.figure",
      { "data-name": heads[i] },
      figure?.error ? h("span.bad-text", { title: figure.error }, "failed") : number(figure?.mean ?? null),
      h("div.muted", {}, between(figure?.low, figure?.high)),
    );
  const row = (name) =>
    h(
      "tr",
      {},
      h("td.word", {}, name),
      runs.map((run, i) => cell(run.aggregates.find((figure) => figure.name === name), i)),
    );
  return h(
    "div.scroll-box",
    {},
    h(
      "table.small.many.stacked.aggregates",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, ""),
          heads.map((head) => h("th.figure", {}, head)),
        ),
      ),
      h("tbody", {}, names.map(row)),
    ),
  );
}

export function causesCard(context, about, change) {
  const toggle = (name) => (item) =>
    change({ [name]: context.query[name] === item.name ? null : item.name, start: null });
  const picked = (name) => (item) => context.query[name] === item.name;
  const list = (pairs, style) => pairs.map(([name, n]) => ({ name, count: n, style }));
  return card(
    "Failures by cause",
    barList(list(about.causes, "bad"), {
      onPick: toggle("cause"),
      isPicked: picked("cause"),
      empty: "Nothing failed.",
    }),
    h("h2", {}, "Stopped by"),
    barList(list(about.stops), { onPick: toggle("stop"), isPicked: picked("stop"), empty: withoutRollouts(about) }),
    h("details.config", {}, h("summary", {}, "Configuration"), h("pre", {}, plainJson(about.metadata))),
  );
}

export function rolloutToolbar(context, about, refresh) {
  const box = h("div.toolbar");
  let timer = 0;
  const typed = (event) => {
    clearTimeout(timer);
    timer = setTimeout(
      () => (context.update({ q: event.target.value || null, start: null }, { isTyping: true }), refresh()),
      200,
    );
  };
  const change = (changes) => (context.update({ ...changes, start: null }), sync(), refresh());
  const input = h("input", {
    type: "search",
    placeholder: "Search all texts",
    value: context.query.q ?? "",
    oninput: typed,
    spellcheck: "false",
  });
  const select = (name, first, options) =>
    h(
      "select",
      { onchange: (event) => change({ [name]: event.target.value || null }), "aria-label": first },
      h("option", { value: "" }, first),
      options.map((option) =>
        h("option", { value: option, selected: context.query[name] === option }, option || "none given"),
      ),
    );
  const chips = h("span.chips");

  function sync() {
    const words = {
      cause: (value) => value,
      stop: (value) => `stopped by ${value}`,
      step: (value) => `step ${value}`,
      truncated: () => "cut off",
    };
    const { low, high } = context.query;
    const range =
      low === undefined
        ? null
        : [
            `reward ${low === high ? shortNumber(Number(low)) : `${shortNumber(Number(low))} to ${shortNumber(Number(high))}`}`,
            { low: null, high: null },
          ];
    const others = Object.keys(words)
      .filter((name) => context.query[name] !== undefined)
      .map((name) => [words[name](context.query[name]), { [name]: null }]);
    replace(
      chips,
      [range, ...others]
        .filter(Boolean)
        .map(([text, changes]) =>
          h("button.chip.filter", { onclick: () => change(changes), title: "remove this filter" }, text, icon("close")),
        ),
    );
    box.querySelectorAll("select").forEach((node) => (node.value = context.query[node.dataset.name] ?? ""));
    if (document.activeElement !== input) input.value = context.query.q ?? "";
  }

  const selects = [["status", select("status", "Scored and failed", ["scored", "failed", "policy error"])]];
  if (about.tasks.length > 1)
    selects.push([
      "task",
      select(
        "task",
        "Every task",
        about.tasks.map(([name]) => name),
      ),
    ]);
  selects.forEach(([name, node]) => (node.dataset.name = name));
  replace(
    box,
    h("label.search", {}, icon("search"), input),
    selects.map(([, node]) => node),
    chips,
  );
  sync();
  return { node: box, sync };
}
