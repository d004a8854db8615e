// One run: its summary, and the table of its rollouts.

import { FILTERS, address, filtersOf } from "./address.js";
import { ask, poll } from "./api.js";
import { h, replace } from "./dom.js";
import { dateTime, duration, percent, plural } from "./format.js";
import { statusChip, tagChips } from "./page_runs.js";
import { causesCard, distributionCard, metricsCard, rolloutToolbar, runTiles } from "./run_cards.js";
import { PAGE, moveSelection, notices, openSelection, pager, progressBar, rolloutTable } from "./table.js";

export function runHead(about, active) {
  const tabs = [
    ...(about.kind === "training" ? [["training", "Training", `run/${about.id}/training`]] : []),
    ["rollouts", "Rollouts", `run/${about.id}`],
    ["rewards", "Reward functions", `run/${about.id}/rewards`],
  ];
  return [
    h(
      "header.page-head",
      {},
      h(
        "div",
        {},
        h("h1", {}, about.env_id || "unknown", statusChip(about)),
        h(
          "p.muted",
          {},
          h("span.model", {}, about.model || "unknown model"),
          ` · ${about.name} · ${dateTime(about.date)}`,
          about.duration_ms === null ? "" : ` · ${duration(about.duration_ms)}`,
        ),
        tagChips(about),
        about.note ? h("p.muted", {}, about.note) : null,
      ),
      h(
        "nav.tabs",
        {},
        tabs.map(([name, words, path]) => h("a", { href: `#/${path}`, class: name === active ? "active" : "" }, words)),
      ),
    ),
    notices(about.notices),
  ];
}

export async function runPage(context) {
  const { root, params, signal } = context;
  const path = `runs/${params.run}`;
  let about = await ask(path);
  context.crumbs([[about.env_id, null]]);
  const [head, figures, table] = [h("div"), h("div"), h("div.rollouts-box")];
  const toolbar = rolloutToolbar(context, about, refreshTable);
  replace(root, head, figures, h("section.card.flush", {}, toolbar.node, table));
  let stamp = about.stamp;
  let isReading = false;
  let known = null;
  let shown = null;
  drawHead();
  await Promise.all([refreshTable(), refreshFigures()]);

  function drawHead() {
    replace(
      head,
      runHead(about, "rollouts"),
      about.share_read < 1
        ? progressBar(about.share_read, `reading the results: ${percent(about.share_read, 0)}`)
        : null,
    );
  }

  async function refreshFigures() {
    known = await ask(`${path}/figures`);
    const reward = known.figures.find((figure) => figure.name === "reward");
    Object.assign(about, { least: reward.least, most: reward.most });
    if (!signal.aborted) drawFigures();
  }

  function drawFigures() {
    replace(
      figures,
      runTiles(about, known),
      h(
        "div.columns",
        {},
        distributionCard(context, about, known, change),
        metricsCard(context, about, known, change),
        causesCard(context, about, change),
      ),
    );
  }

  async function refreshTable() {
    const query = { ...filtersOf(context.query), start: context.query.start, n: PAGE };
    shown = await ask(`${path}/rollouts`, query);
    if (signal.aborted) return;
    isReading = !shown.is_done || shown.share_read < 1;
    const selected = table.querySelector(".selected")?.dataset.number;
    const hrefOf = (row) => address(`run/${params.run}/rollout/${row.number}`, filtersOf(context.query));
    const done = shown.is_done
      ? null
      : progressBar(0.5, `searching… ${plural(shown.total, "match", "matches")} so far`);
    replace(
      table,
      done,
      rolloutTable(shown, about, {
        state: context.query,
        hrefOf,
        onChange: change,
        selected: selected === undefined ? null : Number(selected),
      }),
      pager(shown, context.query, change),
    );
  }

  function change(changes) {
    context.update(changes);
    toolbar.sync();
    if (known) drawFigures();
    return refreshTable();
  }

  poll(
    signal,
    () => (isReading ? 150 : about.is_live ? 1500 : 4000),
    async () => {
      if (!isReading) {
        const now = await ask(`${path}/stamp`);
        if (now.stamp === stamp && now.is_live === about.is_live) return;
        stamp = now.stamp;
      }
      about = { ...(await ask(path)), least: about.least, most: about.most };
      if (signal.aborted) return;
      drawHead();
      await Promise.all([refreshTable(), refreshFigures()]);
    },
  );

  const turn = (by) => () => {
    const start = Number(context.query.start ?? 0) + by * PAGE;
    if (start >= 0 && start < shown.total) change({ start: start ? String(start) : null });
  };
  context.keys([
    ["j ArrowDown", "next rollout", () => moveSelection(table, 1)],
    ["k ArrowUp", "previous rollout", () => moveSelection(table, -1)],
    ["Enter o", "open it", () => openSelection(table)],
    ["l ArrowRight", "next page", turn(1)],
    ["h ArrowLeft", "previous page", turn(-1)],
    ["/", "search", () => toolbar.node.querySelector("input").focus()],
    [
      "f",
      "failed rollouts only, or all",
      () => change({ status: context.query.status === "failed" ? null : "failed", start: null }),
    ],
    [
      "s",
      "sort by reward",
      () =>
        change({
          sort: "reward",
          desc: context.query.sort === "reward" && context.query.desc !== "1" ? "1" : null,
          start: null,
        }),
    ],
    [
      "Escape",
      "clear the filters, or go back to the runs",
      () =>
        Object.keys(filtersOf(context.query)).length
          ? change(Object.fromEntries([...FILTERS, "start"].map((name) => [name, null])))
          : context.go("#/"),
    ],
  ]);
}
