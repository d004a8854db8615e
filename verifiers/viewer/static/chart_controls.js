// The x axis, smoothing and visible range of all training charts, kept in the URL.

import { ask } from "./api.js";
import { h, replace } from "./dom.js";
import { placeWords } from "./lines.js";

const AXES = { step: "Steps", tokens: "Tokens", seconds: "Seconds", samples: "Samples" };

export function chartState(context, logs) {
  const { axis, smooth, from, to } = context.query;
  const known = axisNames(logs).includes(axis) ? axis : "step";
  const weight = Math.min(Math.max(Number(smooth ?? 0) || 0, 0), 0.99);
  const range = [Number(from), Number(to)];
  const isZoomed = from !== undefined && to !== undefined && range[1] > range[0];
  return { axis: known, weight, range: isZoomed ? range : null };
}

// The axes that all of these trainings have.
function axisNames(logs) {
  const has = (name) => name === "step" || logs.every((log) => log.axes?.[name]?.length);
  return Object.keys(AXES).filter(has);
}

export function xsOf(log, axis) {
  return axis === "step" ? log.steps : log.axes[axis];
}

export function xOfStep(log, axis, step) {
  if (axis === "step" || !log.steps.length) return step;
  const at = log.steps.findIndex((value) => value >= step);
  return xsOf(log, axis).at(at < 0 ? -1 : at);
}

export function stepAt(log, axis, x) {
  if (axis === "step" || !log.steps.length) return x;
  const at = xsOf(log, axis).findIndex((value) => value >= x);
  return log.steps.at(at < 0 ? -1 : at);
}

// Long series are thinned; a visible range is requested again in full resolution.
export async function detailed(path, log, { axis, range }) {
  if (!range || log.steps_a_point <= 1) return log;
  return ask(`${path}/training`, { first: stepAt(log, axis, range[0]), last: stepAt(log, axis, range[1]) });
}

export function chartControls(context, logs, redraw) {
  const node = h("div.toolbar.chart-controls");
  const set = (changes, options) => (context.update(changes, options), draw(), redraw());
  const zoom = (range) => set(range ? { from: String(range[0]), to: String(range[1]) } : { from: null, to: null });

  function draw() {
    const { axis, weight, range } = chartState(context, logs());
    const names = axisNames(logs());
    const button = (name) =>
      h(
        "button",
        {
          class: name === axis ? "active" : "",
          onclick: () => set({ axis: name === "step" ? null : name, from: null, to: null }),
        },
        AXES[name],
      );
    const shown = h("output", {}, weight ? weight.toFixed(2) : "off");
    const slider = h("input", {
      type: "range",
      min: 0,
      max: 0.99,
      step: 0.01,
      "aria-label": "smoothing",
      oninput: (event) => {
        const value = Number(event.target.value);
        shown.textContent = value ? value.toFixed(2) : "off";
        context.update({ smooth: value ? String(value) : null }, { isTyping: true });
        redraw();
      },
    });
    slider.value = weight;
    replace(
      node,
      names.length > 1 ? h("div.choice", { role: "group", "aria-label": "the axis below" }, names.map(button)) : null,
      h("label.smoothing", {}, h("span", {}, "Smoothing"), slider, shown),
      range
        ? h(
            "button.reset-zoom",
            { onclick: () => zoom(null), title: "show all of it (double click)" },
            `${placeWords(axis, range[0])} to ${placeWords(axis, range[1], true)}: show all`,
          )
        : h("span.muted.hint", {}, "drag over a chart to zoom"),
    );
  }

  draw();
  return { node, zoom, draw };
}
