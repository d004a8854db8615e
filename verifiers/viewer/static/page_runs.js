// The list of runs with their status and results, and the choice of runs to compare.

import { ask, poll } from "./api.js";
import { sparkline } from "./charts.js";
import { h, icon, replace } from "./dom.js";
import { ago, between, count, dateTime, duration, number, percent, plural, shortNumber } from "./format.js";
import { address } from "./address.js";
import { moveSelection, openSelection } from "./table.js";

const LIST_EVERY_MS = 3000;
const SHOWN_RUNS = 400;
const MOST_COMPARED = 8;

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
      shown.length
        ? runsTable(sorted(shown, context.query).slice(0, SHOWN_RUNS), chosen, pick, context, draw)
        : nothing(found),
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
    const some = [...chosen];
    const kinds = new Set(found.runs.filter((run) => chosen.has(run.id)).map((run) => run.kind));
    const words =
      some.length < 2
        ? "choose more to compare them"
        : kinds.size > 1
          ? "a training and an evaluation cannot be compared"
          : some.length > MOST_COMPARED
            ? `choose up to ${MOST_COMPARED}`
            : null;
    replace(
      compareBar,
      some.length
        ? h(
            "div.bar-inner",
            {},
            `${plural(some.length, "run")} chosen`,
            words === null
              ? h(
                  "a.button.primary",
                  { href: `#/compare/${some.join("/")}` },
                  some.length === 2 ? "Compare the two" : `Compare ${some.length}`,
                )
              : h("span.muted", {}, words),
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
  context.keys([
    ["j ArrowDown", "next run", () => moveSelection(body, 1)],
    ["k ArrowUp", "previous run", () => moveSelection(body, -1)],
    ["Enter o", "open the run", () => openSelection(body)],
    [
      "x",
      "choose it for a comparison",
      () => body.querySelector(".row.selected") && pick(body.querySelector(".row.selected").dataset.run),
    ],
    ["c", "compare those that are chosen", () => compareBar.querySelector("a")?.click()],
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
    h("p", {}, "Create one, without a key or a model, and it appears here:"),
    h("pre", {}, "vf eval arithmetic -m fake -n 20 -s"),
  );
}

function isShown(run, query) {
  const words = [run.env_id, run.model, run.name, run.note, ...run.tags].join(" ").toLowerCase();
  const wanted = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.every((word) => words.includes(word))) return false;
  if (query.kind && run.kind !== query.kind) return false;
  if (query.status && run.status !== query.status) return false;
  if (query.tag && !run.tags.includes(query.tag)) return false;
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
        placeholder: "Filter by environment, model, id, tag",
        value: context.query.q ?? "",
        oninput: change("q"),
        spellcheck: "false",
      }),
    ),
    select("kind", "Every kind", ["evaluation", "training"]),
    select("status", "Every status", ["live", "finished", "unfinished", "damaged"]),
    select("env", "Every environment", unique("env_id")),
    select("model", "Every model", unique("model")),
    runsOf().some((run) => run.tags.length)
      ? select("tag", "Every tag", [...new Set(runsOf().flatMap((run) => run.tags))].sort())
      : null,
  );
}

// Columns of the list: their sort key, and whether to sort in ascending order first.
const COLUMNS = [
  { name: "environment", key: "env_id", isLowFirst: true },
  { name: "model", key: "model", isLowFirst: true },
  { name: "run", key: "name", isLowFirst: true },
  { name: "status", key: "status", isLowFirst: true },
  { name: "reward", key: "reward", style: "figure" },
  { name: "rollouts", key: "size", style: "figure" },
  { name: "failed", key: "failed", style: "figure" },
  { name: "duration", key: "duration_ms", style: "figure" },
  { name: "made", key: "made" },
];

function madeAt(run) {
  return run.is_live ? Infinity : (run.changed ?? Date.parse(run.date) / 1000);
}

function sortKey(run, key) {
  if (key === "size") return run.step ?? run.rollouts;
  return key === "made" ? madeAt(run) : run[key];
}

// Newest first unless a column is chosen; runs without a value come last.
function sorted(runs, { sort = "made", desc }) {
  const column = COLUMNS.find((one) => one.key === sort) ?? COLUMNS.at(-1);
  const isDown = desc === undefined ? !column.isLowFirst : desc === "1";
  const isMissing = (run) => [null, undefined, ""].includes(sortKey(run, column.key));
  const order = (a, b) => {
    const [x, y] = [sortKey(a, column.key), sortKey(b, column.key)];
    return (isDown ? -1 : 1) * (x < y ? -1 : x > y ? 1 : 0);
  };
  const known = runs.filter((run) => !isMissing(run));
  return [...known.sort(order), ...runs.filter(isMissing)];
}

function sortHead(column, context, draw) {
  const { sort = "made", desc } = context.query;
  const isSorted = sort === column.key;
  const isDown = desc === undefined ? !column.isLowFirst : desc === "1";
  const flip = () => {
    const next = isSorted ? !isDown : !column.isLowFirst;
    context.update({ sort: column.key, desc: next ? "1" : "0" }, { isTyping: true });
    draw();
  };
  return h(
    "th",
    { scope: "col", class: column.style ?? "", "aria-sort": isSorted ? (isDown ? "descending" : "ascending") : "none" },
    h(
      "button.sort",
      { class: isSorted ? "sorted" : "", onclick: flip, title: `sort by ${column.name}` },
      h("span.sort-name", {}, column.name),
      isSorted ? icon(isDown ? "down" : "up") : null,
    ),
  );
}

function runsTable(runs, chosen, pick, context, draw) {
  return h(
    "div.table-box",
    {},
    h(
      "table.runs",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, ""),
          COLUMNS.map((column) => sortHead(column, context, draw)),
        ),
      ),
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
  const range = between(run.low, run.high);
  const isLoss = run.kind === "training" && run.reward === null && typeof run.loss === "number";
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
      h("a.open", { href: runHref(run), title: run.note || null }, run.env_id || "unknown"),
      run.kind === "training" ? h("span.chip", {}, "training") : null,
      tagChips(run),
    ),
    h("td.word.model-cell", {}, run.model || "unknown"),
    h("td.id", {}, run.name),
    h("td.status-cell", {}, statusChip(run) ?? h("span.muted", {}, "finished")),
    h(
      "td.figure.reward-column",
      {},
      h("div.reward-line", {}, trend, h("b", {}, isLoss ? `loss ${number(run.loss)}` : number(run.reward))),
      range ? h("div.range", {}, range) : null,
    ),
    h(
      "td.figure",
      { "data-name": run.step === undefined || run.step === null ? "rollouts" : null },
      run.step === undefined || run.step === null ? count(run.rollouts) : `step ${shortNumber(run.step)}`,
    ),
    h("td.figure", { "data-name": "failed" }, failed),
    h("td.figure", { "data-name": null }, duration(run.duration_ms)),
    h("td.when", { title: dateTime(run.date) }, run.is_live ? "now" : ago(madeAt(run))),
  );
}

// The run's tags (from `vf runs tag`); each is a filter.
export function tagChips(run) {
  return run.tags.map((tag) => h("a.chip.tag", { href: address("", { tag }) }, tag));
}

export function statusChip(run) {
  if (run.problem) return h("span.chip.warn", { title: run.problem }, "damaged");
  if (run.is_live) return h("span.chip.live", {}, h("span.dot"), "live");
  return run.is_finished
    ? null
    : h("span.chip.warn", { title: "it was stopped early; vf eval --resume continues it" }, "unfinished");
}
