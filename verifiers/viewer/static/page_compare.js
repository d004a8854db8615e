// Compares two runs example by example: examples won and lost, and the first difference of completions.

import { ask } from "./api.js";
import { conversationView, messagesOf } from "./conversation.js";
import { firstDifference } from "./difference.js";
import { h, replace } from "./dom.js";
import { correctedFor, count, number, plural, shortNumber, signed } from "./format.js";
import { rolloutColumn } from "./page_group.js";
import { overlayPage } from "./page_overlay.js";
import { metricChoice, tablePage } from "./page_table.js";
import { aggregatesTable } from "./run_cards.js";
import { PAGE, card, moveSelection, openSelection, pager, tile } from "./table.js";

// Two evaluations are compared by example, more than two as a table, trainings as curves.
export async function comparePage(context) {
  const ids = context.params.runs.split("/").filter(Boolean);
  const kinds = (await ask("runs")).runs.filter((run) => ids.includes(run.id)).map((run) => run.kind);
  if (kinds.length && kinds.every((kind) => kind === "training")) return overlayPage(context, ids);
  if (kinds.includes("training"))
    throw new Error("A training and an evaluation cannot be compared: choose runs of one kind.");
  if (ids.length > 2) return tablePage(context, ids);
  Object.assign(context.params, { a: ids[0], b: ids[1] });
  return pairPage(context);
}

async function pairPage(context) {
  const { root, params } = context;
  const path = `compare/${params.a}/${params.b}`;
  const [list, detail] = [h("div"), h("div.main-column")];
  let found;
  const top = h("div");
  replace(root, top, h("div.compare-layout", {}, list, detail));
  await refresh();
  await open();

  async function refresh() {
    const { verdict, start, metric } = context.query;
    found = await ask(path, { verdict, start, metric, n: PAGE });
    context.crumbs([["compare", null]]);
    replace(top, compareHead(found, params, metricChoice(found, context, change)));
    replace(
      list,
      card(
        null,
        verdicts(found, context, change),
        exampleTable(found, context, pick),
        pager(found, context.query, change, "example"),
      ),
    );
  }

  async function change(changes) {
    context.update(changes);
    await refresh();
  }

  function pick(example) {
    context.update({ example: JSON.stringify(example), left: null, right: null });
    list
      .querySelectorAll(".row")
      .forEach((row) => row.classList.toggle("selected", row.dataset.example === JSON.stringify(example)));
    return open();
  }

  async function open() {
    const example = context.query.example ?? (found.rows.length ? JSON.stringify(found.rows[0].example_id) : null);
    if (example === null) return replace(detail, h("p.nothing", {}, "There is no example to compare."));
    const pair = await ask(`${path}/example`, { example });
    return replace(detail, pairView(pair, context, params, open));
  }

  const step = (by) => () => (moveSelection(list, by), openSelection(list));
  context.keys([
    ["j ArrowDown", "next example", step(1)],
    ["k ArrowUp", "previous example", step(-1)],
    [
      "d",
      "to the first difference",
      () => document.getElementById("first-difference")?.scrollIntoView({ block: "center" }),
    ],
    ["x", "exchange A and B", () => context.go(`#/compare/${params.b}/${params.a}`)],
    ["Escape u", "back to the runs", () => context.go("#/")],
  ]);
}

function compareHead(found, params, choice) {
  const { figures } = found;
  // Without a verdict there is no comparison, and the mean of a run is over all its examples.
  const meanOf = (run, shared) => (found.refusal === null ? shared : run.reward);
  const side = (name, run, mean, id) =>
    h(
      "a.versus",
      { href: `#/run/${id}` },
      h("span.letter", {}, name),
      h("span", {}, h("b", {}, run.env_id), h("span.muted", {}, ` ${run.model} · ${run.name}`)),
      h("span.figure", {}, number(mean)),
    );
  const corrected = figures.metrics > 1 ? `, ${number(figures.adjusted_p)}${correctedFor(figures.metrics, " metrics")}` : "";
  const failed = figures.failed_a + figures.failed_b;
  return [
    h("header.page-head", {}, h("h1", {}, "Two runs"), choice),
    h(
      "div.versus-box",
      {},
      side("A", found.a, meanOf(found.a, figures.mean_a), params.a),
      side("B", found.b, meanOf(found.b, figures.mean_b), params.b),
    ),
    h(
      "div.tiles",
      {},
      found.refusal === null ? null : tile("verdict", "No verdict", "", "words"),
      found.refusal !== null
        ? null
        : tile(
            found.metric === "reward" ? "B − A" : `B − A in ${found.metric}`,
            signed(figures.difference),
            figures.low === null
              ? "no interval"
              : `${shortNumber(Math.round(1000 * figures.level) / 10)}% interval ${signed(figures.low)} to ${signed(figures.high)}`,
            "main",
          ),
      found.refusal !== null
        ? null
        : tile(
            "verdict",
            figures.difference === null ? "no example has a score in both" : found.verdict,
            figures.p_value === null ? "" : `p = ${number(figures.p_value)}${corrected}, ${figures.test}`,
            "words",
          ),
      found.refusal !== null
        ? null
        : tile("won by B", count(found.counts.won), `of ${plural(figures.examples, "shared example")}`),
      found.refusal !== null ? null : tile("lost by B", count(found.counts.lost), `${count(found.counts.tied)} tied`),
      tile(
        "not compared",
        count(found.counts["only in A"] + found.counts["only in B"] + found.counts["without a score"]),
        `${count(found.counts["only in A"])} only in A, ${count(found.counts["only in B"])} only in B`,
      ),
      failed
        ? tile(
            "failed",
            count(failed),
            `${count(figures.failed_a)} in A, ${count(figures.failed_b)} in B; left out`,
            "bad",
          )
        : null,
    ),
    found.refusal === null ? null : h("p.notice-line", {}, `No verdict: ${found.refusal}.`),
    found.a.aggregates.length || found.b.aggregates.length
      ? h(
          "div.figures-box",
          {},
          card("Aggregate metrics, with their 95% intervals", aggregatesTable(["A", "B"], [found.a, found.b])),
        )
      : null,
  ];
}

function verdicts(found, context, change) {
  const names = ["lost", "won", "tied", "only in A", "only in B", "without a score"].filter(
    (name) => found.counts[name],
  );
  const neutral = found.refusal === null ? {} : { lost: "A higher", won: "B higher", tied: "equal" };
  const button = (name, words) =>
    h(
      "button",
      {
        class: (context.query.verdict ?? "") === name ? "active" : "",
        onclick: () => change({ verdict: name || null, start: null }),
      },
      words,
    );
  return h(
    "div.choice.wrap",
    {},
    button("", "all"),
    names.map((name) => button(name, `${neutral[name] ?? name} ${count(found.counts[name])}`)),
  );
}

function exampleTable(found, context, pick) {
  const row = (item, i) => {
    const key = JSON.stringify(item.example_id);
    const isChosen = context.query.example ? context.query.example === key : i === 0;
    return h(
      "tr.row",
      { "data-example": key, class: isChosen ? "selected" : "" },
      h(
        "td.key",
        {},
        h(
          "a.open",
          { href: "#", onclick: (event) => (event.preventDefault(), pick(item.example_id)) },
          String(item.example_id),
        ),
      ),
      h("td.figure", {}, number(item.mean_a, 2)),
      h("td.figure", {}, number(item.mean_b, 2)),
      h(
        "td.figure",
        {
          class:
            found.refusal !== null
              ? "muted"
              : item.verdict === "won"
                ? "good-text"
                : item.verdict === "lost"
                  ? "bad-text"
                  : "muted",
        },
        item.difference === null
          ? item.verdict
          : found.refusal === null
            ? signed(Math.abs(item.difference) < 1e-9 ? 0 : item.difference, 2)
            : "",
      ),
    );
  };
  return h(
    "table.small.examples",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["example", "A", "B", found.refusal === null ? "B − A" : ""].map((name, i) => h("th", { class: i ? "figure" : "" }, name)),
      ),
    ),
    h("tbody", {}, found.rows.map(row)),
  );
}

// The rollouts that show a change best: the worst of one side and the best of the other, or the first of each.
function shownPair(pair, query) {
  const rewards = (rollouts) => rollouts.map((rollout) => rollout.reward ?? NaN);
  const mean = (values) =>
    values.filter((value) => !Number.isNaN(value)).reduce((sum, value, _, all) => sum + value / all.length, 0);
  const at = (values, best) => Math.max(0, values.indexOf(best(...values.filter((value) => !Number.isNaN(value)))));
  const [a, b] = [rewards(pair.a), rewards(pair.b)];
  const change = Math.sign(mean(b) - mean(a));
  const left = change > 0 ? at(a, Math.min) : change < 0 ? at(a, Math.max) : 0;
  const right = change > 0 ? at(b, Math.max) : change < 0 ? at(b, Math.min) : 0;
  return { left: Number(query.left ?? left), right: Number(query.right ?? right) };
}

function pairView(pair, context, params, redraw) {
  const shown = shownPair(pair, context.query);
  const [left, right] = [pair.a[shown.left], pair.b[shown.right]];
  const chooser = (side, rollouts, name) =>
    rollouts.length > 1
      ? h(
          "div.choice",
          {},
          rollouts.map((rollout, i) =>
            h(
              "button",
              {
                class: shown[side] === i ? "active" : "",
                onclick: () => (context.update({ [side]: String(i) }), redraw()),
              },
              `${name}·${rollout.rollout}`,
            ),
          ),
        )
      : null;
  const isSamePrompt = left && right && JSON.stringify(left.prompt) === JSON.stringify(right.prompt);
  const mark =
    left && right
      ? firstDifference(messagesOf(left.completion, "assistant"), messagesOf(right.completion, "assistant"))
      : null;
  const column = (rollout, run, letter) =>
    rollout
      ? rolloutColumn(rollout, run, { withPrompt: !isSamePrompt, mark, letter })
      : h("section.column", {}, h("p.nothing", {}, "This run has no rollout of the example."));
  return [
    h(
      "div.section-head",
      {},
      h("h2", {}, `Example ${pair.example_id}`),
      h("span.muted", {}, mark ? "the first difference is marked" : left && right ? "no difference" : ""),
      h("span.push"),
      chooser("left", pair.a, "A"),
      chooser("right", pair.b, "B"),
    ),
    left && right && !isSamePrompt
      ? h("p.notice-line", {}, "The prompts of the two runs differ.")
      : null,
    isSamePrompt
      ? h("details.shared-prompt", {}, h("summary", {}, "Prompt"), conversationView(messagesOf(left.prompt, "user")))
      : null,
    h("div.side-by-side.two", {}, column(left, params.a, "A"), column(right, params.b, "B")),
  ];
}
