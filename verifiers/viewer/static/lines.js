// Line charts in SVG over steps, tokens, seconds or samples, with a shared pointer, and zoomed by dragging.

import { responsive, tickTexts, ticks } from "./charts.js";
import { h, replace, svg } from "./dom.js";
import { compact, duration, number, percent, shortNumber } from "./format.js";

export const LINE_STYLES = ["a", "b", "c", "d", "e", "f", "g", "h"];
const DRAGGED = 6; // pixels after which a click counts as a drag
let clips = 0; // number of drawings so far, for unique ids of their clip paths
const hovering = new Set(); // the charts of a page, which share the pointer position

export function clearHover() {
  hovering.clear();
}

// An exponential moving average, corrected for its start; missing values stay missing.
export function smoothed(values, weight) {
  if (!weight) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// series: [{name, xs, values, raw, low, high, style}], with arrays as long as xs; points: [{x, value, low, high,
// words, style}]; marks: [{x, words}]; range: [first, last] shown; onZoom(range or null); onPick(x)
export function lineChart({ series, axis = "step", ...options }) {
  const shown = series.filter((line) => line.values?.some((value) => value !== null && value !== undefined));
  const points = (options.points ?? []).filter((point) => point.value !== null && point.value !== undefined);
  if (!shown.length && !points.length) return null;
  const names = shown.length + (points.length ? 1 : 0) > 1 && !options.hidesLegend;
  const legend = h(
    "div.legend",
    {},
    shown.map((line) => h(`span.key.${line.style ?? "a"}`, {}, line.name)),
    points.length ? h("span.key.eval", {}, "evaluation") : null,
  );
  const readout = h("div.readout");
  const chart = responsive("lines", (width) =>
    drawLines({ height: 190, ...options, shown, points, axis, width, readout }),
  );
  return h("div", {}, names ? legend : null, readout, chart);
}

function drawLines({ shown, points, marks = [], height, isShare, onPick, onZoom, range, width, readout, axis }) {
  const [right, top, bottom] = [12, 8, 22];
  const all = [...shown.flatMap((line) => line.xs), ...points.map((point) => point.x)];
  const first = range?.[0] ?? all.reduce((a, b) => Math.min(a, b), Infinity);
  const last = range?.[1] ?? all.reduce((a, b) => Math.max(a, b), -Infinity);
  const isIn = (value) => value >= first && value <= last;
  const [low, high] = limitsOf(shown, points, isShare, isIn);
  const levels = ticks(low, high, height > 220 ? 5.5 : 4.2);
  const texts = isShare ? levels.map((value) => percent(value, 0)) : tickTexts(levels);
  const left = Math.max(46, 10 + 6.6 * Math.max(...texts.map((text) => text.length)));
  const x = (value) => left + (last > first ? (value - first) / (last - first) : 0.5) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const grid = levels.map((value, i) => [
    svg("line.grid", { x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    svg("text.tick.side", { x: left - 8, y: y(value) + 3.5 }, texts[i]),
  ]);
  const below = ticks(first, last, Math.max(2, Math.floor(width / 80)))
    .filter((value) => axis === "seconds" || Number.isInteger(value))
    .map((value) => svg("text.tick", { x: x(value), y: height - 6 }, placeWords(axis, value, true)));
  clips += 1;
  const id = `clip-${clips}`;
  const clip = svg(
    "clipPath",
    { id },
    svg("rect", { x: left - 5, y: 0, width: Math.max(width - left - right + 10, 0), height }),
  );
  const inside = svg(
    "g",
    { "clip-path": `url(#${id})` },
    shown.map((line) => bandOf(line, x, y)),
    shown.map((line) => (line.raw ? pathOf({ ...line, values: line.raw }, x, y, "raw") : null)),
    shown.map((line) => pathOf(line, x, y)),
    points.filter((point) => isIn(point.x)).map((point) => dotOf(point, x, y)),
  );
  const warnings = marks
    .filter((mark) => isIn(mark.x))
    .map((mark) =>
      svg(
        "g.notice-mark",
        {},
        svg("line", { x1: x(mark.x), x2: x(mark.x), y1: top, y2: height - bottom }),
        svg("title", {}, mark.words),
        svg("path", { d: `M${x(mark.x) - 4} ${top - 2}h8l-4 6z` }),
      ),
    );
  const cross = svg("line.cross", { y1: top, y2: height - bottom, visibility: "hidden" });
  const heads = shown.map((line) => svg(`circle.head.${line.style ?? "a"}`, { r: 3.5, visibility: "hidden" }));
  const chosen = svg("rect.zoomed", { y: top, height: height - top - bottom, visibility: "hidden" });
  const drawing = svg(
    "svg",
    { width, height, role: "img", "aria-label": shown.map((line) => line.name).join(", ") },
    svg("defs", {}, clip),
    grid,
    below,
    chosen,
    warnings,
    inside,
    cross,
    heads,
  );
  const point = (at) => pointAt({ at, shown, x, y, cross, heads, readout, isShare, axis, isIn });
  hovering.add(point);
  const placeOf = (event) =>
    Math.min(Math.max(first + ((event.offsetX - left) / (width - left - right)) * (last - first), first), last);
  listenToMouse(drawing, { placeOf, x, chosen, onPick, onZoom, shown });
  return drawing;
}

function listenToMouse(drawing, { placeOf, x, chosen, onPick, onZoom, shown }) {
  let began = null;
  drawing.addEventListener("mousedown", (event) => (began = { at: placeOf(event), pixel: event.offsetX }));
  drawing.addEventListener("mousemove", (event) => {
    hovering.forEach((other) => other(placeOf(event)));
    if (!began || !onZoom || Math.abs(event.offsetX - began.pixel) < DRAGGED) return;
    const ends = [x(began.at), x(placeOf(event))].sort((a, b) => a - b);
    chosen.setAttribute("x", ends[0]);
    chosen.setAttribute("width", ends[1] - ends[0]);
    chosen.setAttribute("visibility", "visible");
  });
  drawing.addEventListener("mouseup", (event) => {
    if (!began) return;
    const [from, to] = [began.at, placeOf(event)].sort((a, b) => a - b);
    const isStretch = Math.abs(event.offsetX - began.pixel) >= DRAGGED;
    began = null;
    chosen.setAttribute("visibility", "hidden");
    if (isStretch && onZoom && to > from) onZoom([from, to]);
    else if (!isStretch && onPick && shown.length) onPick(from);
  });
  drawing.addEventListener("dblclick", () => onZoom?.(null));
  drawing.addEventListener("mouseleave", () => {
    began = null;
    chosen.setAttribute("visibility", "hidden");
    hovering.forEach((other) => other(null));
  });
}

export function placeWords(axis, value, isShort = false) {
  if (axis === "seconds") return value ? duration(1000 * value) : "0";
  if (isShort) return compact(value);
  return axis === "step" ? `step ${shortNumber(value)}` : `${compact(value)} ${axis}`;
}

function limitsOf(shown, points, isShare, isIn) {
  const known = [];
  const take = (value) => value !== null && value !== undefined && known.push(value);
  for (const line of shown)
    line.xs.forEach(
      (place, i) => isIn(place) && [line.values[i], line.raw?.[i], line.low?.[i], line.high?.[i]].forEach(take),
    );
  points.filter((point) => isIn(point.x)).forEach((point) => [point.value, point.low, point.high].forEach(take));
  let [low, high] = [
    known.reduce((a, b) => Math.min(a, b), Infinity),
    known.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
  if (!known.length) [low, high] = [0, 1];
  if (isShare) [low, high] = [0, Math.max(high, 0.05)];
  else if (low > 0 && low < high * 0.6) low = 0;
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= size * 1e-9) [low, high] = [low - (size * 0.1 || 0.5), high + (size * 0.1 || 0.5)];
  else if (high - low < size * 1e-3) [low, high] = [low - size * 5e-4, high + size * 5e-4]; // do not magnify differences in the last digit
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, isShare && high >= 1 ? 1 : high + room];
}

function bandOf(line, x, y) {
  if (!line.low || !line.high) return null;
  const known = line.xs.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
  if (known.length < 2) return null;
  const there = known.map((i) => `${x(line.xs[i]).toFixed(1)},${y(line.high[i]).toFixed(1)}`);
  const back = known.reverse().map((i) => `${x(line.xs[i]).toFixed(1)},${y(line.low[i]).toFixed(1)}`);
  return svg(`polygon.band.${line.style ?? "a"}`, { points: [...there, ...back].join(" ") });
}

function pathOf(line, x, y, kind = "whole") {
  let d = "";
  let isDown = false;
  line.values.forEach((value, i) => {
    if (value === null || value === undefined) isDown = false;
    else {
      d += `${isDown ? "L" : "M"}${x(line.xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = true;
    }
  });
  const known = line.values.filter((value) => value !== null && value !== undefined).length;
  const lone = known === 1 ? line.values.findIndex((value) => value !== null && value !== undefined) : -1;
  return lone >= 0
    ? svg(`circle.line-dot.${line.style ?? "a"}`, { cx: x(line.xs[lone]), cy: y(line.values[lone]), r: 3 })
    : svg(`path.line.${line.style ?? "a"}`, { d, class: kind });
}

function dotOf(point, x, y) {
  const isBare = point.low === null || point.low === undefined;
  const range = isBare ? "" : ` [${number(point.low)}, ${number(point.high)}]`;
  return svg(
    "g.eval",
    { class: point.style ? `of-${point.style}` : "" },
    svg("title", {}, `${point.words}: ${number(point.value)}${range}`),
    isBare ? null : svg("line", { x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high) }),
    svg("circle", { cx: x(point.x), cy: y(point.value), r: 4 }),
  );
}

function nearestTo(xs, wanted) {
  let best = 0;
  xs.forEach((value, i) => {
    if (Math.abs(value - wanted) < Math.abs(xs[best] - wanted)) best = i;
  });
  return best;
}

function pointAt({ at, shown, x, y, cross, heads, readout, isShare, axis, isIn }) {
  const isOn = at !== null && at !== undefined && shown.length > 0;
  const places = shown.map((line) => (isOn ? nearestTo(line.xs, at) : -1));
  const first = isOn ? shown[0].xs[places[0]] : null;
  cross.setAttribute("visibility", isOn ? "visible" : "hidden");
  if (isOn) ["x1", "x2"].forEach((name) => cross.setAttribute(name, x(shown.length > 1 ? at : first)));
  shown.forEach((line, i) => {
    const value = isOn ? line.values[places[i]] : null;
    const isShown = value !== null && value !== undefined && isIn(line.xs[places[i]]);
    heads[i].setAttribute("visibility", isShown ? "visible" : "hidden");
    if (isShown) {
      heads[i].setAttribute("cx", x(line.xs[places[i]]));
      heads[i].setAttribute("cy", y(value));
    }
  });
  const words = (line, i) => {
    const [value, low, high] = [line.values[i], line.low?.[i], line.high?.[i]];
    const between = low === null || low === undefined ? "" : ` [${number(low)}, ${number(high)}]`;
    return `${isShare ? percent(value) : shortNumber(value)}${between}`;
  };
  replace(
    readout,
    isOn
      ? [
          h("span.step", {}, placeWords(axis, first)),
          shown.map((line, i) => h(`span.value.${line.style ?? "a"}`, { title: line.name }, words(line, places[i]))),
        ]
      : null,
  );
}
