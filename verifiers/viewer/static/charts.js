// Series → drawings in SVG, made anew for the width they get.

import { h, replace, svg } from "./dom.js";
import { compact, count, number, percent, shortNumber } from "./format.js";

// A chart that is drawn again when its room changes.
function responsive(className, draw) {
  const box = h(`div.chart.${className}`);
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== width) {
      width = box.clientWidth;
      replace(box, draw(width));
    }
  }).observe(box);
  return box;
}

// Numbers on an axis, just precise enough to be the numbers they stand for.
export function tickTexts(values) {
  const most = Math.max(...values.map(Math.abs));
  const [unit, suffix] =
    most >= 1e6
      ? [1e6, "M"]
      : most >= 1e4
        ? [1e3, "K"]
        : most < 1e-3
          ? [10 ** Math.floor(Math.log10(most || 1)), ""]
          : [1, ""];
  const between = Math.abs(values[1] - values[0]) || most || 1;
  const isExact = (digits) =>
    values.every((value) => Math.abs(Number((value / unit).toFixed(digits)) * unit - value) < between / 50);
  const digits = [0, 1, 2, 3, 4, 5, 6].find(isExact) ?? 6;
  const power = unit < 1 ? `e${Math.round(Math.log10(unit))}` : suffix;
  return values.map((value) => (value === 0 ? "0" : `${(value / unit).toFixed(digits)}${power}`.replaceAll("-", "−")));
}

export function ticks(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * magnitude).find((size) => size >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step)
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

// --- distribution -------------------------------------------------------------------------------------------------------

// bins: [{low, high, count}]; a bar is a button if onPick is given.
export function histogramChart(bins, { height = 180, onPick, isPicked = () => false, mark } = {}) {
  return responsive("histogram", (width) => {
    const most = Math.max(...bins.map((bin) => bin.count), 1);
    const total = bins.reduce((sum, bin) => sum + bin.count, 0);
    const [left, right, top, bottom] = [6, 6, 22, 22];
    const isExact = bins.every((bin) => bin.low === bin.high);
    const slot = (width - left - right) / bins.length;
    const gap = Math.min(isExact ? slot * 0.35 : 2, 28);
    const bar = Math.min(slot - gap, isExact ? 96 : slot);
    const y = (n) => top + (height - top - bottom) * (1 - n / most);
    const bars = bins.map((bin, i) => {
      const x = left + i * slot + (slot - bar) / 2;
      const tall = bin.count ? Math.max(height - bottom - y(bin.count), 1.5) : 0;
      const label = isExact ? shortNumber(bin.low) : `${shortNumber(bin.low)} to ${shortNumber(bin.high)}`;
      const node = svg(
        "g.bar",
        {
          class: isPicked(bin) ? "picked" : "",
          onclick: onPick && (() => onPick(bin)),
          role: onPick ? "button" : null,
        },
        svg("title", {}, `${label}: ${count(bin.count)} (${percent(bin.count / total)})`),
        svg("rect.room", { x: left + i * slot, y: 0, width: slot, height: height - bottom }),
        svg("rect.fill", {
          x,
          y: height - bottom - tall,
          width: bar,
          height: tall,
          rx: Math.min(3, bar / 4, tall / 2),
        }),
      );
      const isRoomy = slot > 34;
      if (isRoomy && bin.count)
        node.append(svg("text.count", { x: x + bar / 2, y: height - bottom - tall - 6 }, compact(bin.count)));
      return node;
    });
    const labels = binLabels(bins, { left, slot, y: height - 6 });
    const base = svg("line.axis", {
      x1: left,
      x2: width - right,
      y1: height - bottom + 0.5,
      y2: height - bottom + 0.5,
    });
    return svg(
      "svg",
      { width, height, role: "img", "aria-label": `distribution of ${mark ?? "rewards"}` },
      bars,
      base,
      labels,
    );
  });
}

// Values stand under their bars; ranges have their edges under the gaps, as many as there is room for.
function binLabels(bins, { left, slot, y }) {
  const isExact = bins.every((bin) => bin.low === bin.high);
  const every = Math.ceil((isExact ? 30 : 46) / slot);
  const texts = isExact ? bins.map((bin) => bin.low) : [...bins.map((bin) => bin.low), bins.at(-1).high];
  return texts.map((value, i) => {
    const isEnd = !isExact && (i === 0 || i === texts.length - 1);
    if (i % every || (isEnd && i > 0)) return null;
    const style = isEnd ? "text.tick.start" : "text.tick";
    return svg(style, { x: left + (i + (isExact ? 0.5 : 0)) * slot, y }, shortNumber(value));
  });
}

// A mean with its interval between the least and the most, one line high.
export function whisker({ mean, low, high, least, most }) {
  const from = Math.min(0, least ?? 0);
  const to = Math.max(1, most ?? 1);
  return responsive("whisker", (width) => {
    const x = (value) => 5 + ((value - from) / (to - from || 1)) * (width - 10);
    const range =
      low === null || low === undefined ? null : svg("line.range", { x1: x(low), x2: x(high), y1: 8, y2: 8 });
    return svg(
      "svg",
      { width, height: 16, "aria-hidden": "true" },
      svg("line.axis", { x1: 5, x2: width - 5, y1: 8, y2: 8 }),
      range,
      mean === null ? null : svg("circle.mean", { cx: x(mean), cy: 8, r: 3 }),
    );
  });
}

export function sparkline(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const point = (value, i) =>
    `${((i / (values.length - 1)) * 70 + 1).toFixed(1)},${(17 - ((value - low) / (high - low || 1)) * 14).toFixed(1)}`;
  const points = values.map((value, i) => (value === null ? null : point(value, i))).filter(Boolean);
  return svg(
    "svg.sparkline",
    { viewBox: "0 0 72 20", width: 72, height: 20, "aria-hidden": "true" },
    svg("polyline", { points: points.join(" ") }),
  );
}

// --- lines over steps ---------------------------------------------------------------------------------------------------

const hovering = new Set(); // charts of a page point at the same step together

export function clearHover() {
  hovering.clear();
}

// series: [{name, values, low, high, style}]; points: [{step, value, low, high}]; marks: [{step, words}]
export function lineChart({ steps, series, points = [], marks = [], height = 190, isShare = false, onPick }) {
  const shown = series.filter((line) => line.values?.some((value) => value !== null));
  if (!shown.length && !points.length) return null;
  const legend = h(
    "div.legend",
    {},
    shown.map((line) => h(`span.key.${line.style ?? "a"}`, {}, line.name)),
    points.length ? h("span.key.eval", {}, "evaluation") : null,
  );
  const readout = h("div.readout");
  const chart = responsive("lines", (width) =>
    drawLines({ steps, shown, points, marks, height, isShare, onPick, width, readout }),
  );
  return h("div", {}, shown.length + (points.length ? 1 : 0) > 1 ? legend : null, readout, chart);
}

function drawLines({ steps, shown, points, marks, height, isShare, onPick, width, readout }) {
  const [left, right, top, bottom] = [46, 12, 8, 22];
  const allSteps = [...steps, ...points.map((point) => point.step)];
  const [first, last] = [Math.min(...allSteps), Math.max(...allSteps)];
  const [low, high] = limitsOf(shown, points, isShare);
  const x = (step) => left + (last > first ? (step - first) / (last - first) : 0.5) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const levels = ticks(low, high, height > 220 ? 5.5 : 4.2);
  const texts = isShare ? levels.map((value) => percent(value, 0)) : tickTexts(levels);
  const grid = levels.map((value, i) => [
    svg("line.grid", { x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    svg("text.tick.side", { x: left - 8, y: y(value) + 3.5 }, texts[i]),
  ]);
  const below = ticks(first, last, Math.max(2, Math.floor(width / 80)))
    .filter(Number.isInteger)
    .map((step) => svg("text.tick", { x: x(step), y: height - 6 }, compact(step)));
  const warnings = marks.map((mark) =>
    svg(
      "g.notice-mark",
      {},
      svg("line", { x1: x(mark.step), x2: x(mark.step), y1: top, y2: height - bottom }),
      svg("title", {}, `step ${mark.step}: ${mark.words}`),
      svg("path", { d: `M${x(mark.step) - 4} ${top - 2}h8l-4 6z` }),
    ),
  );
  const dots = points
    .filter((point) => point.value !== null && point.value !== undefined)
    .map((point) =>
      svg(
        "g.eval",
        {},
        svg(
          "title",
          {},
          `evaluation at step ${point.step}: ${number(point.value)}${point.low === null || point.low === undefined ? "" : ` [${number(point.low)}, ${number(point.high)}]`}`,
        ),
        point.low === null || point.low === undefined
          ? null
          : svg("line", { x1: x(point.step), x2: x(point.step), y1: y(point.low), y2: y(point.high) }),
        svg("circle", { cx: x(point.step), cy: y(point.value), r: 4 }),
      ),
    );
  const cross = svg("line.cross", { y1: top, y2: height - bottom, visibility: "hidden" });
  const heads = shown.map((line) => svg(`circle.head.${line.style ?? "a"}`, { r: 3.2, visibility: "hidden" }));
  const drawing = svg(
    "svg",
    { width, height, role: "img", "aria-label": shown.map((line) => line.name).join(", ") },
    grid,
    svg("line.axis", { x1: left, x2: width - right, y1: height - bottom + 0.5, y2: height - bottom + 0.5 }),
    below,
    shown.map((line) => bandOf(line, steps, x, y)),
    shown.map((line) => pathsOf(line, steps, x, y)),
    warnings,
    dots,
    cross,
    heads,
  );
  const point = (at) => pointAt({ at, steps, shown, x, y, cross, heads, readout, isShare });
  hovering.add(point);
  const stepAt = (event) => nearest(steps, first + ((event.offsetX - left) / (width - left - right)) * (last - first));
  drawing.addEventListener("mousemove", (event) => hovering.forEach((other) => other(stepAt(event))));
  drawing.addEventListener("mouseleave", () => hovering.forEach((other) => other(null)));
  if (onPick) drawing.addEventListener("click", (event) => steps.length && onPick(steps[stepAt(event)]));
  return drawing;
}

function limitsOf(shown, points, isShare) {
  const values = shown.flatMap((line) => [...line.values, ...(line.low ?? []), ...(line.high ?? [])]);
  values.push(...points.flatMap((point) => [point.value, point.low, point.high]));
  const known = values.filter((value) => value !== null && value !== undefined);
  let [low, high] = [
    known.reduce((a, b) => Math.min(a, b), Infinity),
    known.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
  if (isShare) [low, high] = [0, Math.max(high, 0.05)];
  else if (low > 0 && low < high * 0.6) low = 0;
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (low === high) [low, high] = [low - (size * 0.1 || 0.5), high + (size * 0.1 || 0.5)];
  else if (high - low < size * 1e-3) [low, high] = [low - size * 5e-4, high + size * 5e-4]; // not a drama of the last digit
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, isShare && high >= 1 ? 1 : high + room];
}

function bandOf(line, steps, x, y) {
  if (!line.low || !line.high) return null;
  const known = steps.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
  if (known.length < 2) return null;
  const there = known.map((i) => `${x(steps[i]).toFixed(1)},${y(line.high[i]).toFixed(1)}`);
  const back = known.reverse().map((i) => `${x(steps[i]).toFixed(1)},${y(line.low[i]).toFixed(1)}`);
  return svg(`polygon.band.${line.style ?? "a"}`, { points: [...there, ...back].join(" ") });
}

function pathsOf(line, steps, x, y) {
  let d = "";
  let isDown = false;
  line.values.forEach((value, i) => {
    if (value === null) isDown = false;
    else {
      d += `${isDown ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = true;
    }
  });
  const known = line.values.filter((value) => value !== null).length;
  const lone = known === 1 ? line.values.findIndex((value) => value !== null) : -1;
  return lone >= 0
    ? svg(`circle.line-dot.${line.style ?? "a"}`, { cx: x(steps[lone]), cy: y(line.values[lone]), r: 3 })
    : svg(`path.line.${line.style ?? "a"}`, { d });
}

function nearest(steps, wanted) {
  let best = 0;
  steps.forEach((step, i) => {
    if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i;
  });
  return best;
}

function pointAt({ at, steps, shown, x, y, cross, heads, readout, isShare }) {
  const isOn = at !== null && steps[at] !== undefined;
  cross.setAttribute("visibility", isOn ? "visible" : "hidden");
  if (isOn) ["x1", "x2"].forEach((name) => cross.setAttribute(name, x(steps[at])));
  shown.forEach((line, i) => {
    const value = isOn ? line.values[at] : null;
    heads[i].setAttribute("visibility", value === null || value === undefined ? "hidden" : "visible");
    if (value !== null && value !== undefined) {
      heads[i].setAttribute("cx", x(steps[at]));
      heads[i].setAttribute("cy", y(value));
    }
  });
  const words = (line) => {
    const value = line.values[at];
    const range =
      line.low?.[at] === null || line.low?.[at] === undefined
        ? ""
        : ` [${number(line.low[at])}, ${number(line.high[at])}]`;
    return `${isShare ? percent(value) : shortNumber(value)}${range}`;
  };
  replace(
    readout,
    isOn
      ? [
          h("span.step", {}, `step ${shortNumber(steps[at])}`),
          shown.map((line) => h(`span.value.${line.style ?? "a"}`, {}, words(line))),
        ]
      : null,
  );
}

// --- lists with bars ----------------------------------------------------------------------------------------------------

// items: [{name, count, style}], each a button that filters
export function barList(items, { onPick, isPicked = () => false, empty }) {
  if (!items.length) return h("p.muted", {}, empty);
  const most = Math.max(...items.map((item) => item.count), 1);
  return h(
    "ul.bar-list",
    {},
    items.map((item) => {
      const bar = h("span.bar-fill", { class: item.style ?? "" });
      bar.style.width = `${Math.max((100 * item.count) / most, 0.5)}%`;
      const label = [
        bar,
        h("span.bar-name", { title: item.name }, item.name || "none given"),
        h("span.bar-count", {}, count(item.count)),
      ];
      return h(
        "li",
        {},
        h("button.bar-item", { class: isPicked(item) ? "picked" : "", onclick: () => onPick(item) }, label),
      );
    }),
  );
}
