// Several trainings: their curves in the same charts, and the settings in which they differ.

import { ask, poll } from "./api.js";
import { chartControls, chartState, detailed, xsOf } from "./chart_controls.js";
import { h, icon, replace } from "./dom.js";
import { duration, number, plainJson, plural, shortNumber } from "./format.js";
import { LINE_STYLES, clearHover, lineChart } from "./lines.js";
import { CHARTS, NOT_CURVES, curveOf, evaluationPoints } from "./page_training.js";
import { card } from "./table.js";

export async function overlayPage(context, ids) {
  const { root, signal } = context;
  const read = () => Promise.all(ids.map(async (id) => [await ask(`runs/${id}`), await ask(`runs/${id}/training`)]));
  let found = await read();
  const logs = () => found.map(([, log]) => log);
  const [head, body, table] = [h("div"), h("div"), h("div")];
  const controls = chartControls(context, logs, drawCurves);
  const filter = h("input", {
    type: "search",
    placeholder: "Filter charts",
    value: context.query.q ?? "",
    spellcheck: "false",
    oninput: (event) => (context.update({ q: event.target.value || null }, { isTyping: true }), drawCurves()),
  });
  const search = h("label.search", {}, icon("search"), filter);
  context.crumbs([[plural(ids.length, "training"), null]]);
  replace(root, head, h("div.overlay-tools", {}, controls.node, search), body, table);
  await draw();

  function draw() {
    replace(head, overlayHead(found));
    replace(table, settingsCard(found));
    return drawCurves();
  }

  async function drawCurves() {
    const state = chartState(context, logs());
    const shown = await Promise.all(ids.map((id, i) => detailed(`runs/${id}`, found[i][1], state)));
    if (signal.aborted) return;
    clearHover();
    replace(body, overlaid(found, shown, { ...state, onZoom: controls.zoom }, context.query.q ?? ""));
  }

  poll(
    signal,
    () => (found.some(([about]) => about.is_live) ? 2000 : 6000),
    async () => {
      const stamps = await Promise.all(ids.map((id) => ask(`runs/${id}/stamp`)));
      if (stamps.every((now, i) => now.stamp === found[i][0].stamp)) return;
      found = await read();
      if (!signal.aborted) await draw();
    },
  );
  context.keys([
    ["z", "show all of the curves", () => controls.zoom(null)],
    ["/", "filter the charts", () => filter.focus()],
    ["Escape u", "back to the runs", () => context.go("#/")],
  ]);
}

function styleOf(i) {
  return LINE_STYLES[i % LINE_STYLES.length];
}

function overlayHead(found) {
  const row = ([about, log], i) =>
    h(
      "a.versus",
      { href: `#/run/${about.id}/training` },
      h(`span.key.${styleOf(i)}`),
      h("span", {}, h("b", {}, about.name), h("span.muted", {}, ` ${about.env_id} · ${about.model}`)),
      h("span.push"),
      h("span.muted", {}, `step ${shortNumber(log.last_step)} · ${duration(about.duration_ms)}`),
      h("span.figure", {}, number(log.series.reward?.at(-1) ?? log.series.loss?.at(-1))),
    );
  return [
    h("header.page-head", {}, h("div", {}, h("h1", {}, plural(found.length, "training")))),
    h("div.versus-box", {}, found.map(row)),
    h(
      "p.muted.overlay-note",
      {},
      "Each curve is a single training. Only more seeds show how much two of them differ by chance.",
    ),
  ];
}

function overlaid(found, logs, state, wanted) {
  const { axis, onZoom } = state;
  const xs = logs.flatMap((log) => xsOf(log, axis));
  const range = state.range ?? (xs.length ? ends(xs) : null);
  const names = [...new Set(logs.flatMap((log) => Object.keys(log.series)))];
  const titles = new Map(CHARTS.flatMap((chart) => chart.lines.map(([name, words]) => [name, titleOf(chart, words)])));
  const order = ["reward", ...titles.keys()];
  const place = (name) =>
    order.includes(name) ? order.indexOf(name) : name.startsWith("metrics.") ? 1.5 : order.length;
  const shown = names
    .filter((name) => name === "reward" || !NOT_CURVES.has(name))
    .sort((a, b) => place(a) - place(b))
    .map((name) => [name, name === "reward" ? "Reward" : (titles.get(name) ?? name.replace(/^metrics\./, ""))])
    .filter(([name, title]) => `${name} ${title}`.toLowerCase().includes(wanted.toLowerCase()));
  const chart = (name, options) =>
    lineChart({
      ...options,
      axis,
      range,
      onZoom,
      hidesLegend: true,
      isShare: CHARTS.some((one) => one.isShare && one.lines.some(([other]) => other === name)),
      series: logs.map((log, i) => curveOf(log, { name, words: found[i][0].name, style: styleOf(i), ...state })),
    });
  const points = logs.flatMap((log, i) => evaluationPoints(log, axis, styleOf(i)));
  const evaluations = lineChart({
    axis,
    range,
    onZoom,
    hidesLegend: true,
    series: evaluationLines(found, logs, axis),
    points,
    height: 240,
  });
  const first = shown.some(([name]) => name === "reward");
  const wide = first ? chart("reward", { height: 280 }) : null;
  const cards = shown
    .filter(([name]) => name !== "reward")
    .map(([name, title]) => [title, chart(name)])
    .filter(([, node]) => node)
    .map(([title, node]) => card(title, node));
  return [
    wide ? card("Reward", wide) : null,
    evaluations && "evaluations".includes(wanted.toLowerCase()) ? card("Evaluations", evaluations) : null,
    h("div.chart-grid", {}, cards),
    wide || cards.length ? null : h("p.nothing", {}, "No chart matches."),
  ];
}

function ends(xs) {
  return [xs.reduce((a, b) => Math.min(a, b), Infinity), xs.reduce((a, b) => Math.max(a, b), -Infinity)];
}

function titleOf(chart, words) {
  return chart.lines.length > 1 ? `${chart.title}: ${words}` : chart.title;
}

function evaluationLines(found, logs, axis) {
  return logs.map((log, i) => {
    const points = evaluationPoints(log, axis).filter((point) => point.value !== null);
    return {
      name: found[i][0].name,
      xs: points.map((point) => point.x),
      values: points.map((point) => point.value),
      style: styleOf(i),
    };
  });
}

// The settings in which the trainings differ.
function settingsCard(found) {
  const settings = found.map(([about]) => flat({ env_id: about.env_id, model: about.model, ...about.metadata.config }));
  const names = [...new Set(settings.flatMap((one) => [...one.keys()]))].filter(
    (name) =>
      !["output_dir", "run_name"].includes(name) && new Set(settings.map((one) => one.get(name) ?? "")).size > 1,
  );
  const head = h(
    "tr",
    {},
    h("th", {}, "setting"),
    found.map(([about], i) => h("th", {}, h(`span.key.${styleOf(i)}`, {}, about.name))),
  );
  const row = (name) =>
    h(
      "tr",
      {},
      h("td.word", {}, name),
      settings.map((one) => h("td", { title: one.get(name) ?? "" }, rounded(one.get(name) ?? "–"))),
    );
  return card(
    "Settings that differ",
    names.length
      ? h(
          "div.scroll-box",
          {},
          h("table.small.settings", {}, h("thead", {}, head), h("tbody", {}, names.slice(0, 60).map(row))),
        )
      : h("p.muted", {}, "None of the recorded settings."),
  );
}

// Rounds numbers with many digits.
function rounded(text) {
  return /^-?\d+\.\d{7,}$/.test(text) ? String(Number(Number(text).toPrecision(6))) : text;
}

function flat(value, path = "", into = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && path.length < 80)
    for (const [name, item] of Object.entries(value)) flat(item, path ? `${path}.${name}` : name, into);
  else into.set(path, typeof value === "string" ? value : plainJson(value));
  return into;
}
