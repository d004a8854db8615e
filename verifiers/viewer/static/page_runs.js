// The list of runs: what there is, how it went, and which two to compare.

import { ask, poll } from "./api.js";
import { sparkline } from "./charts.js";
import { h, icon, replace } from "./dom.js";
import { ago, count, dateTime, number, percent, plural, shortNumber } from "./format.js";
import { setKeys } from "./keys.js";
import { moveSelection, openSelection } from "./table.js";

const LIST_EVERY_MS = 3000;
const SHOWN_RUNS = 400;

export async function runsPage(context) {
  const { root, signal } = context;
  const chosen = new Set();
  let found = await ask("runs");
  const body = h("div");
  const compareBar = h("div.compare-bar");
  const toolbar = filters(context, () => found.runs, draw);
  replace(
    root,
    h("header.page-head", {}, h("h1", {}, "Runs"), h("p.muted", {}, placesOf(found))),
    toolbar,
    compareBar,
    body,
  );
  draw();

  function draw() {
    const selected = body.querySelector(".selected")?.dataset.run;
    const shown = found.runs.filter((run) => isShown(run, context.query));
    replace(
      body,
      shown.length ? runsTable(shown.slice(0, SHOWN_RUNS), chosen, pick) : nothing(found),
      shown.length > SHOWN_RUNS
        ? h("p.nothing", {}, `and ${plural(shown.length - SHOWN_RUNS, "older run")}: filter to find them`)
        : null,
    );
    [...body.querySelectorAll(".row")].find((row) => row.dataset.run === selected)?.classList.add("selected");
    drawBar();
  }

  function pick(id) {
    if (!chosen.delete(id)) chosen.add(id);
    draw();
  }

  function drawBar() {
    const two = [...chosen];
    replace(
      compareBar,
      two.length
        ? h(
            "div.bar-inner",
            {},
            `${plural(two.length, "run")} chosen`,
            two.length === 2
              ? h("a.button.primary", { href: `#/compare/${two.join("/")}` }, "Compare the two")
              : h("span.muted", {}, "choose two to compare them"),
            h("button", { onclick: () => (chosen.clear(), draw()) }, "Clear"),
          )
        : null,
    );
  }

  const isSame = (runs) => JSON.stringify(runs) === JSON.stringify(found.runs);
  poll(
    signal,
    () => LIST_EVERY_MS,
    async () => {
      const newer = await ask("runs");
      if (signal.aborted || isSame(newer.runs)) return;
      found = newer;
      draw();
    },
  );
  setKeys([
    ["j ArrowDown", "next run", () => moveSelection(body, 1)],
    ["k ArrowUp", "previous run", () => moveSelection(body, -1)],
    ["Enter o", "open the run", () => openSelection(body)],
    [
      "x",
      "choose it for a comparison",
      () => body.querySelector(".row.selected") && pick(body.querySelector(".row.selected").dataset.run),
    ],
    ["c", "compare the two that are chosen", () => compareBar.querySelector("a")?.click()],
    ["/", "filter", () => toolbar.querySelector("input").focus()],
  ]);
}

function placesOf(found) {
  return found.roots.length ? `under ${found.roots.join(", ")}` : "in this file";
}

function nothing(found) {
  if (found.runs.length) return h("p.nothing", {}, "No run matches these filters.");
  return h(
    "div.empty",
    {},
    h("h2", {}, "There is no run here yet"),
    h("p", {}, "Make one with no key and no model, and it shows up on this page:"),
    h("pre", {}, "vf eval arithmetic -m fake -n 20 -s"),
  );
}

function isShown(run, query) {
  const words = `${run.env_id} ${run.model} ${run.name}`.toLowerCase();
  const wanted = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.every((word) => words.includes(word))) return false;
  if (query.kind === "live" ? !run.is_live : query.kind && run.kind !== query.kind) return false;
  return (!query.env || run.env_id === query.env) && (!query.model || run.model === query.model);
}

function filters(context, runsOf, draw) {
  const change = (name) => (event) => {
    context.update({ [name]: event.target.value || null }, { isTyping: true });
    draw();
  };
  const select = (name, first, options) =>
    h(
      "select",
      { onchange: change(name), "aria-label": first },
      h("option", { value: "" }, first),
      options.map((option) => h("option", { value: option, selected: context.query[name] === option }, option)),
    );
  const unique = (name) => [...new Set(runsOf().map((run) => run[name]))].sort();
  return h(
    "div.toolbar",
    {},
    h(
      "label.search",
      {},
      icon("search"),
      h("input", {
        type: "search",
        placeholder: "Filter by environment, model or id",
        value: context.query.q ?? "",
        oninput: change("q"),
        spellcheck: "false",
      }),
    ),
    select("kind", "Every kind", ["evaluation", "training", "live"]),
    select("env", "Every environment", unique("env_id")),
    select("model", "Every model", unique("model")),
  );
}

function runsTable(runs, chosen, pick) {
  const head = ["", "environment", "model", "run", "reward", "rollouts", "failed", "made"].map((name, i) =>
    h("th", { scope: "col", class: i >= 4 && i < 7 ? "figure" : "" }, name),
  );
  return h(
    "div.table-box",
    {},
    h(
      "table.runs",
      {},
      h("thead", {}, h("tr", {}, head)),
      h(
        "tbody",
        {},
        runs.map((run) => runRow(run, chosen, pick)),
      ),
    ),
  );
}

export function runHref(run) {
  return `#/run/${run.id}${run.kind === "training" ? "/training" : ""}`;
}

function runRow(run, chosen, pick) {
  const trend = run.rewards ? sparkline(run.rewards) : null;
  const failed = run.failed
    ? h("span.bad-text", { title: percent(run.failed / (run.rollouts || 1)) }, count(run.failed))
    : count(run.failed);
  return h(
    "tr.row",
    { "data-run": run.id },
    h(
      "td.check",
      {},
      h("input", {
        type: "checkbox",
        checked: chosen.has(run.id),
        onchange: () => pick(run.id),
        "aria-label": "choose for a comparison",
      }),
    ),
    h(
      "td.key",
      {},
      h("a.open", { href: runHref(run) }, run.env_id || "unknown"),
      run.kind === "training" ? h("span.chip", {}, "training") : null,
      statusChip(run),
    ),
    h("td.word", {}, run.model || "unknown"),
    h("td.id", {}, run.name),
    h("td.figure", {}, trend, h("b", {}, number(run.reward))),
    h(
      "td.figure",
      {},
      run.step === undefined || run.step === null ? count(run.rollouts) : `step ${shortNumber(run.step)}`,
    ),
    h("td.figure", {}, failed),
    h("td.when", { title: dateTime(run.date) }, run.is_live ? "now" : ago(run.changed ?? Date.parse(run.date) / 1000)),
  );
}

export function statusChip(run) {
  if (run.problem) return h("span.chip.warn", { title: run.problem }, "damaged");
  if (run.is_live) return h("span.chip.live", {}, h("span.dot"), "live");
  return run.is_finished
    ? null
    : h("span.chip.warn", { title: "it was stopped before its end; vf eval --resume goes on with it" }, "unfinished");
}
