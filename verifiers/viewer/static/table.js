// The table of rollouts, with sorting, paging and keyboard navigation.

import { h, icon } from "./dom.js";
import { NONE, compact, count, duration, number, plural, shortNumber, signed } from "./format.js";

export const PAGE = 50;
const SHOWN_METRICS = 3;
const NOT_SHOWN = ["reward", "num_turns", "parse_retries"]; // have their own column, or are equal in most rows

// Selects rows (elements with class "row") of any table with j and k.
export function moveSelection(root, by) {
  const rows = [...root.querySelectorAll(".row")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("selected"));
  const next = Math.min(Math.max(at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by, 0), rows.length - 1);
  rows[at]?.classList.remove("selected");
  rows[next].classList.add("selected");
  rows[next].scrollIntoView({ block: "nearest" });
}

export function openSelection(root) {
  root.querySelector(".row.selected a.open")?.click();
}

// state: {sort, desc, start, …}; onChange is called with the changes
export function rolloutTable(found, about, { state, hrefOf, onChange, selected = null }) {
  const columns = columnsOf(found, about);
  const head = columns.map((column) => headCell(column, state, onChange));
  const range = rewardRange(found.rows, about);
  const rows = found.rows.map((row) =>
    h(
      "tr.row",
      {
        class: `${row.status === "failed" ? "failed" : ""}${row.number === selected ? " selected" : ""}`,
        "data-number": row.number,
      },
      columns.map((column) =>
        h(`td.${column.style}`, { "data-name": column.name }, column.cell(row, hrefOf(row), range)),
      ),
    ),
  );
  const body = rows.length
    ? rows
    : [
        h(
          "tr",
          {},
          h(
            "td.nothing",
            { colspan: columns.length },
            found.of ? "No rollout matches." : withoutRollouts(about),
          ),
        ),
      ];
  return h("div.table-box", {}, h("table.rollouts", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export function withoutRollouts(about) {
  return about.is_live ? "No rollout is finished yet." : "There are no rollouts.";
}

function headCell(column, state, onChange) {
  if (!column.sort) return h(`th.${column.style}`, { scope: "col" }, column.name);
  const isSorted = (state.sort ?? "number") === column.sort;
  const isDown = state.desc === "1";
  const flip = () =>
    onChange({
      sort: column.sort,
      desc: isSorted ? (isDown ? null : "1") : column.isLowFirst ? null : "1",
      start: null,
    });
  return h(
    `th.${column.style}`,
    { scope: "col", "aria-sort": isSorted ? (isDown ? "descending" : "ascending") : "none" },
    h(
      "button.sort",
      { class: isSorted ? "sorted" : "", onclick: flip, title: `sort by ${column.name}` },
      h("span.sort-name", {}, column.name),
      isSorted ? icon(isDown ? "down" : "up") : null,
    ),
  );
}

function columnsOf(found, about) {
  const has = (name) => found.rows.some((row) => row[name] !== null && row[name] !== "");
  const metrics = about.metric_names.filter((name) => !NOT_SHOWN.includes(name)).slice(0, SHOWN_METRICS);
  const all = [
    {
      name: "#",
      style: "figure",
      sort: "number",
      isLowFirst: true,
      cell: (row, href) => h("a.open", { href }, count(row.number)),
    },
    {
      name: "example",
      style: "key",
      sort: "example",
      isLowFirst: true,
      cell: (row, href) => [h("a.example", { href }, String(row.example_id)), h("span.muted", {}, ` ·${row.rollout}`)],
    },
    about.steps.length
      ? { name: "step", style: "figure", sort: "step", isLowFirst: true, cell: (row) => shortNumber(row.step) }
      : null,
    { name: "reward", style: "reward", sort: "reward", cell: rewardCell },
    about.has_advantages
      ? { name: "advantage", style: "figure", sort: "advantage", cell: (row) => signed(row.advantage, 2) }
      : null,
    ...metrics.map((name) => ({
      name,
      style: "figure",
      sort: `metric:${name}`,
      cell: (row) => shortNumber(row.metrics[name]),
    })),
    about.tasks.length > 1 ? { name: "task", style: "word", cell: (row) => row.task } : null,
    { name: "asked", style: "words", cell: (row) => row.asked },
    {
      name: "replied",
      style: "words",
      cell: (row) => (row.status === "failed" ? h("span.cause", {}, row.cause) : row.replied),
    },
    has("stop")
      ? {
          name: "stopped by",
          style: "word",
          cell: (row) => [row.stop || NONE, row.is_truncated ? h("span.chip.warn", {}, "cut") : null],
        }
      : null,
    has("tokens") ? { name: "tokens", style: "figure", sort: "tokens", cell: (row) => compact(row.tokens) } : null,
    has("time_ms") ? { name: "time", style: "figure", sort: "time", cell: (row) => duration(row.time_ms) } : null,
  ];
  return all.filter(Boolean);
}

function rewardRange(rows, about) {
  const known = [...rows.map((row) => row.reward), about.least, about.most].filter(
    (value) => value !== null && value !== undefined,
  );
  return [Math.min(0, ...known), Math.max(1, ...known)];
}

export function rewardCell(row, _href, [low, high] = [0, 1]) {
  if (row.status === "failed") return h("span.chip.bad", {}, "failed");
  if (row.reward === null || row.reward === undefined) return NONE;
  const bar = h("span.meter-fill");
  bar.style.width = `${(100 * (row.reward - low)) / (high - low || 1)}%`;
  return h(
    "span.reward-cell",
    {},
    h("span.meter", {}, bar),
    h("span", {}, number(row.reward)),
    row.status === "policy error" ? h("span.chip.warn", { title: row.cause }, "error") : null,
  );
}

export function pager(found, state, onChange, word = "rollout") {
  const start = found.start ?? Number(state.start ?? 0);
  const last = Math.min(start + PAGE, found.total);
  const go = (to) => onChange({ start: to > 0 ? String(to) : null });
  const of = found.of !== undefined && found.of !== found.total ? ` of ${count(found.of)}` : "";
  return h(
    "nav.pager",
    { "aria-label": "pages" },
    h(
      "span.muted",
      {},
      found.total
        ? `${count(start + 1)}–${count(last)} of ${plural(found.total, word)}${of ? `, ${count(found.of)} in all` : ""}`
        : plural(0, word),
    ),
    h("button", { disabled: start === 0, onclick: () => go(0), title: "first page" }, "First"),
    h(
      "button.icon-button",
      { disabled: start === 0, onclick: () => go(start - PAGE), title: "previous page (h)" },
      icon("left"),
    ),
    h(
      "button.icon-button",
      { disabled: last >= found.total, onclick: () => go(start + PAGE), title: "next page (l)" },
      icon("right"),
    ),
    h(
      "button",
      {
        disabled: last >= found.total,
        onclick: () => go(Math.floor((found.total - 1) / PAGE) * PAGE),
        title: "last page",
      },
      "Last",
    ),
  );
}

export function progressBar(share, words) {
  const fill = h("span.progress-fill");
  fill.style.width = `${100 * share}%`;
  return h("div.progress", { role: "progressbar" }, h("span.progress-track", {}, fill), h("span.muted", {}, words));
}

export function notices(list) {
  return list.length
    ? h(
        "div.notices",
        { role: "status" },
        list.map((words) => h("p", {}, icon("warning"), h("span", {}, words))),
      )
    : null;
}

export function card(title, ...children) {
  return h("section.card", {}, title ? h("h2", {}, title) : null, children);
}

export function tile(name, value, detail = null, style = "") {
  return h(
    "div.tile",
    { class: style },
    h("div.tile-name", {}, name),
    h("div.tile-value", {}, value),
    h("div.tile-detail", {}, detail ?? ""),
  );
}
