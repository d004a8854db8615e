// Draws charts in SVG, again whenever their width changes.

import { h, replace, svg } from "./dom.js";
import { compact, count, percent, shortNumber } from "./format.js";

// A chart that is redrawn when its size changes.
export function responsive(className, draw) {
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

// Labels of an axis, with just enough digits.
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

// Labels: values under their bars, or the edges of ranges under the gaps, as many as fit.
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

// A mean with its interval on a scale from the minimum to the maximum, one line high.
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
