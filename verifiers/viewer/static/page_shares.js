// The contribution of each reward function to the mean reward, by step of a training or in an evaluation.

import { ask } from "./api.js";
import { h, replace } from "./dom.js";
import { NONE, number, percent, shortNumber, signed } from "./format.js";
import { LINE_STYLES, clearHover, lineChart } from "./lines.js";
import { runHead } from "./page_run.js";
import { card } from "./table.js";

export async function sharesPage(context) {
  const { root, params } = context;
  const path = `runs/${params.run}`;
  const [about, found] = await Promise.all([ask(path), ask(`${path}/shares`)]);
  context.crumbs([
    [about.env_id, `#/run/${params.run}`],
    ["rewards", null],
  ]);
  clearHover();
  const rest = restOf(found);
  const parts = rest ? [...found.functions, rest] : found.functions;
  replace(
    root,
    runHead(about, "rewards"),
    found.functions.length
      ? [
          found.steps.length > 1
            ? card("What each function adds to the mean reward, step by step", added(found, parts))
            : null,
          card("Shares in the mean reward", explanation(found), shareTable(found, parts)),
        ]
      : h(
          "p.nothing",
          {},
          "This run has no recorded weights of reward functions: it was made by an older version, or each row has its own weights.",
        ),
  );
  context.keys([["Escape u", "back to the run", () => context.go(`#/run/${params.run}`)]]);
}

// The part of the reward that the weighted functions do not explain: a custom reward, or rollouts without a function.
function restOf(found) {
  const values = found.reward.map((reward, i) => {
    const known = found.functions.map((one) => one.values[i]).filter((value) => value !== null);
    return reward === null ? null : reward - known.reduce((sum, value) => sum + value, 0);
  });
  const size = Math.max(...values.map((value) => Math.abs(value ?? 0)), 0);
  return size > 1e-6 ? { name: "not explained by these", weight: null, values, means: [], isRest: true } : null;
}

function added(found, parts) {
  const series = parts.map((one, i) => ({
    name: one.name,
    xs: found.steps,
    values: one.values,
    style: LINE_STYLES[(i + 1) % LINE_STYLES.length],
  }));
  const reward = { name: "mean reward", xs: found.steps, values: found.reward, style: "a" };
  return lineChart({ series: [reward, ...series], height: 280 });
}

function explanation(found) {
  return h(
    "p.muted.explanation",
    {},
    "The mean reward is the sum, over the reward functions, of weight × mean score.",
    found.functions.some((one) => one.is_scheduled) ? " Weights change on a schedule; the last is shown." : null,
  );
}

function shareTable(found, parts) {
  const isLong = found.steps.length > 1;
  const total = found.reward.at(-1);
  const sum = parts.reduce((whole, one) => whole + Math.abs(one.values.at(-1) ?? 0), 0);
  const names = ["reward function", "weight", "mean", "adds", "share", ...(isLong ? ["since the start"] : [])];
  const row = (one) => {
    const value = one.values.at(-1);
    const bar = h("span.meter-fill", { class: value < 0 ? "bad" : "" });
    bar.style.width = `${sum ? (100 * Math.abs(value ?? 0)) / sum : 0}%`;
    const first = one.values.find((known) => known !== null);
    return h(
      "tr",
      {},
      h("td.word", {}, one.name),
      h("td.figure", {}, one.weight === null ? NONE : shortNumber(one.weight)),
      h("td.figure", {}, one.means.length ? number(one.means.at(-1)) : NONE),
      h("td.figure", {}, signed(value)),
      h(
        "td",
        {},
        h("span.reward-cell", {}, h("span.meter", {}, bar), sum ? percent(Math.abs(value ?? 0) / sum) : NONE),
      ),
      isLong ? h("td.figure", {}, value === null || first === undefined ? NONE : signed(value - first)) : null,
    );
  };
  const start = found.reward.find((known) => known !== null);
  return h(
    "div.scroll-box",
    {},
    h(
      "table.small.shares",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          names.map((name, i) => h("th", { class: i && i !== 4 ? "figure" : "" }, name)),
        ),
      ),
      h("tbody", {}, parts.map(row)),
      h(
        "tfoot",
        {},
        h(
          "tr",
          {},
          h("td", {}, h("b", {}, "mean reward")),
          h("td"),
          h("td"),
          h("td.figure", {}, h("b", {}, number(total))),
          h("td"),
          isLong ? h("td.figure", {}, total === null || start === undefined ? NONE : signed(total - start)) : null,
        ),
      ),
    ),
  );
}
