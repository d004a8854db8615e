// A training: its curves, notices, and the samples of each step.

import { ask, poll } from "./api.js";
import { chartControls, chartState, detailed, stepAt, xOfStep, xsOf } from "./chart_controls.js";
import { histogramChart } from "./charts.js";
import { h, icon, replace } from "./dom.js";
import { compact, count, duration, number, percent, plural, shortNumber } from "./format.js";
import { address } from "./address.js";
import { LINE_STYLES, clearHover, lineChart, smoothed } from "./lines.js";
import { runHead } from "./page_run.js";
import { moveSelection, openSelection, rolloutTable, tile } from "./table.js";

// Charts in order of importance; a metric in none of them gets its own chart at the end.
export const CHARTS = [
  { title: "KL to the reference", lines: [["kl", "KL"]] },
  { title: "Entropy", lines: [["entropy", "entropy"]] },
  {
    title: "Completion length",
    lines: [
      ["completion_tokens", "mean"],
      ["completion_tokens_max", "longest"],
    ],
  },
  {
    title: "Shares",
    lines: [
      ["clip_fraction", "clipped"],
      ["zero_variance", "groups without variance"],
      ["truncated", "cut off"],
    ],
    isShare: true,
  },
  { title: "Throughput, tokens per second", lines: [["tokens_per_s", "tokens/s"]] },
  {
    title: "Seconds per step",
    lines: [
      ["generation_s", "generation"],
      ["training_s", "training"],
      ["scoring_s", "scoring"],
      ["step_s", "whole step"],
    ],
  },
  { title: "Loss", lines: [["loss", "loss"]] },
  { title: "Gradient norm", lines: [["grad_norm", "gradient norm"]] },
  { title: "Learning rate", lines: [["learning_rate", "learning rate"]] },
  {
    title: "Probability ratio",
    lines: [
      ["ratio_mean", "mean"],
      ["ratio_max", "largest"],
    ],
  },
];
const COUNTS = ["num_turns", "parse_retries"]; // counts, which have another scale than scores
export const NOT_CURVES = new Set([
  "reward",
  "reward_low",
  "reward_high",
  "time",
  "epoch",
  "samples",
  "total_tokens",
  "failed",
  "reward_std",
  "reward_sampled",
  "reward_sampled_low",
  "reward_sampled_high",
  "sampled",
  "trained_tokens",
  "sampled_tokens",
]);

export async function trainingPage(context) {
  const { root, params, signal } = context;
  const path = `runs/${params.run}`;
  let [about, log] = await Promise.all([ask(path), ask(`${path}/training`)]);
  context.crumbs([[about.env_id, null]]);
  const [head, curves] = [h("div"), h("div")];
  const samples = samplesBox(context, path, params, signal);
  const controls = chartControls(context, () => [log], drawCurves);
  replace(root, head, controls.node, curves, samples.node);
  let stamp = about.stamp;
  await draw();
  await samples.refresh(about);

  function draw() {
    replace(head, runHead(about, "training"), trainingTiles(about, log), doctorBox(log.notices));
    controls.node.hidden = !log.steps.length;
    return drawCurves();
  }

  async function drawCurves() {
    const state = chartState(context, [log]);
    const shown = await detailed(path, log, state);
    if (signal.aborted) return;
    clearHover();
    const onPick = (x) => samples.pick(stepAt(log, state.axis, x));
    replace(
      curves,
      log.steps.length || log.evaluations.length
        ? charts(shown, { ...state, onPick, onZoom: controls.zoom })
        : h("p.nothing", {}, "No step is finished yet."),
    );
  }

  poll(
    signal,
    () => (about.is_live ? 1500 : 4000),
    async () => {
      const now = await ask(`${path}/stamp`);
      if (now.stamp === stamp && now.is_live === about.is_live && now.share_read === 1) return;
      stamp = now.stamp;
      [about, log] = await Promise.all([ask(path), ask(`${path}/training`)]);
      if (signal.aborted) return;
      controls.draw();
      await draw();
      await samples.refresh(about);
    },
  );
  context.keys([
    ["j ArrowDown", "next sample", () => moveSelection(samples.node, 1)],
    ["k ArrowUp", "previous sample", () => moveSelection(samples.node, -1)],
    ["Enter o", "open it", () => openSelection(samples.node)],
    ["l ArrowRight", "samples of the next step", () => samples.move(1)],
    ["h ArrowLeft", "samples of the step before", () => samples.move(-1)],
    ["Escape u", "back to the runs", () => context.go("#/")],
  ]);
}

function trainingTiles(about, log) {
  const last = (name) => log.series[name]?.at(-1) ?? null;
  const reward = last("reward");
  const evaluation = log.evaluations.at(-1);
  const range = last("reward_low") === null ? "" : `${number(last("reward_low"))} to ${number(last("reward_high"))}`;
  return h(
    "div.tiles",
    {},
    tile("reward", number(reward), range, "main"),
    evaluation
      ? tile(
          "evaluation",
          number(evaluation.reward),
          `step ${shortNumber(evaluation.step)}${evaluation.low === null || evaluation.low === undefined ? "" : `, ${number(evaluation.low)} to ${number(evaluation.high)}`}`,
        )
      : null,
    tile("step", shortNumber(log.last_step), last("epoch") === null ? "" : `epoch ${number(last("epoch"), 2)}`),
    tile(
      "zero variance",
      percent(last("zero_variance")),
      "of the groups",
      last("zero_variance") > 0.7 ? "warn" : "",
    ),
    tile(
      "throughput",
      compact(last("tokens_per_s")),
      last("step_s") === null ? "tokens/s" : `tokens/s, ${duration(1000 * last("step_s"))} a step`,
    ),
    tile(
      "tokens",
      compact(last("total_tokens")),
      about.failed ? `${plural(about.failed, "rollout")} failed` : "none failed",
    ),
  );
}

function doctorBox(list) {
  if (!list.length) return null;
  const shown = list.slice(-4).reverse();
  return h(
    "div.notices",
    { role: "status" },
    shown.map((item) =>
      h("p", {}, icon("warning"), h("span", {}, h("b", {}, `step ${shortNumber(item.step)} `), item.notice)),
    ),
    list.length > shown.length ? h("p.muted", {}, `and ${plural(list.length - shown.length, "earlier notice")}`) : null,
  );
}

export function evaluationPoints(log, axis, style) {
  return log.evaluations.map((item) => ({
    x: xOfStep(log, axis, item.step),
    value: item.reward,
    low: item.low,
    high: item.high,
    words: `evaluation after step ${shortNumber(item.step)}`,
    style,
  }));
}

// One smoothed series, with the raw values behind it.
export function curveOf(log, { name, words, style, axis, weight }) {
  const values = log.series[name];
  if (!values) return { name: words, xs: [], values: [], style };
  return { name: words, xs: xsOf(log, axis), values: smoothed(values, weight), raw: weight ? values : null, style };
}

function charts(log, { axis, weight, range, onPick, onZoom }) {
  const marks = log.notices.map((item) => ({
    x: xOfStep(log, axis, item.step),
    words: `step ${shortNumber(item.step)}: ${item.notice}`,
  }));
  const points = evaluationPoints(log, axis);
  const line = ([name, words], i) =>
    curveOf(log, { name, words, axis, weight, style: LINE_STYLES[i % LINE_STYLES.length] });
  const common = { axis, range, onPick, onZoom };
  const band = weight ? {} : { low: log.series.reward_low, high: log.series.reward_high };
  const reward = { ...line(["reward", "reward"], 0), ...band };
  const isFiltered = log.series.reward_sampled?.some((value, i) => value !== log.series.reward?.[i]);
  const sampled = isFiltered ? [line(["reward_sampled", "of all sampled"], 1)] : [];
  const used = new Set(CHARTS.flatMap((chart) => chart.lines.map(([name]) => name)));
  const others = Object.keys(log.series).filter(
    (name) => !used.has(name) && !NOT_CURVES.has(name) && !name.startsWith("metrics."),
  );
  const isCount = (name) => COUNTS.includes(name.slice(8));
  const metrics = Object.keys(log.series)
    .filter((name) => name.startsWith("metrics."))
    .sort((a, b) => isCount(a) - isCount(b));
  const together = metrics.filter((name) => !isCount(name)).slice(0, LINE_STYLES.length);
  const all = [
    { title: "Reward functions and metrics", lines: together.map((name) => [name, name.slice(8)]) },
    ...CHARTS,
    ...metrics.slice(together.length).map((name) => ({ title: name.slice(8), lines: [[name, name.slice(8)]] })),
    ...others.map((name) => ({ title: name, lines: [[name, name]] })),
  ];
  const small = all
    .map((chart) => [chart, lineChart({ ...common, series: chart.lines.map(line), isShare: chart.isShare })])
    .filter(([, node]) => node);
  const wide = lineChart({ ...common, series: [reward, ...sampled], points, marks, height: 260 });
  const every =
    log.steps_a_point > 1
      ? h("span.muted", {}, ` each point is the mean of up to ${plural(log.steps_a_point, "step")}`)
      : null;
  return [
    wide ? h("section.card", {}, h("h2", {}, "Reward, with its 95% interval", every), wide) : null,
    h(
      "div.chart-grid",
      {},
      small.map(([chart, node]) => h("section.card", {}, h("h2", {}, chart.title), node)),
      log.ratio_histogram ? ratioCard(log.ratio_histogram) : null,
    ),
  ];
}

function ratioCard({ edges, counts }) {
  const bins = counts.map((n, i) => ({ low: edges[i], high: edges[i + 1], count: n }));
  return h(
    "section.card",
    {},
    h("h2", {}, "Probability ratios of the last step"),
    histogramChart(bins, { mark: "probability ratios", height: 190 }),
  );
}

// --- samples by step ----------------------------------------------------------------------------------------------------

const SAMPLES = 12;

function samplesBox(context, path, params, signal) {
  const [table, control] = [h("div"), h("div.step-control")];
  const node = h("section.card.flush", {}, h("div.toolbar", {}, h("h2", {}, "Samples by step"), control), table);
  let about = null;
  const current = () => {
    const steps = about.steps.map(([step]) => step);
    const wanted = context.query.step === undefined ? Infinity : Number(context.query.step);
    return steps.reduce(
      (best, step) =>
        Math.abs(step - wanted) < Math.abs(best - wanted) || (wanted === Infinity && step > best) ? step : best,
      steps[0],
    );
  };

  async function refresh(newer) {
    about = newer;
    node.hidden = !about.steps.length;
    if (node.hidden) return;
    const step = current();
    drawControl(step);
    const query = { step, n: SAMPLES, start: context.query.start, sort: context.query.sort, desc: context.query.desc };
    const found = await ask(`${path}/rollouts`, query);
    if (signal.aborted) return;
    const change = (changes) => (context.update(changes), refresh(about));
    const hrefOf = (row) => address(`run/${params.run}/rollout/${row.number}`, { step });
    const pages =
      found.total > found.rows.length
        ? h(
            "p.more-line",
            {},
            h(
              "a",
              { href: address(`run/${params.run}`, { step }) },
              `all ${plural(found.total, "rollout")} of this step`,
            ),
          )
        : null;
    replace(
      table,
      rolloutTable(found, { ...about, steps: [] }, { state: context.query, hrefOf, onChange: change }),
      pages,
    );
  }

  function drawControl(step) {
    const steps = about.steps.map(([value]) => value);
    const at = steps.indexOf(step);
    const slider = h("input", {
      type: "range",
      min: 0,
      max: steps.length - 1,
      step: 1,
      "aria-label": "step",
      oninput: (event) => pick(steps[Number(event.target.value)]),
    });
    slider.value = at;
    if (control.contains(document.activeElement) && control.querySelector("input")) {
      control.querySelector("b").textContent = `step ${shortNumber(step)}`;
      return;
    }
    replace(
      control,
      h("b", {}, `step ${shortNumber(step)}`),
      slider,
      h("span.muted", {}, `${plural(steps.length, "step")} with samples`),
    );
  }

  function pick(step) {
    context.update({ step: String(step), start: null }, { isTyping: true });
    return about && refresh(about);
  }

  function move(by) {
    const steps = about.steps.map(([value]) => value);
    const next = steps[steps.indexOf(current()) + by];
    if (next !== undefined) pick(next);
  }

  return { node, refresh, pick, move };
}
