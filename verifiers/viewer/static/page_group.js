// The rollouts of one example side by side.

import { ask } from "./api.js";
import { conversationView, messagesOf } from "./conversation.js";
import { h, replace } from "./dom.js";
import { compact, duration, number, plural, signed } from "./format.js";
import { address } from "./address.js";
import { errorCard } from "./page_rollout.js";
import { rewardCell } from "./table.js";

export async function groupPage(context) {
  const { root, params } = context;
  const example = context.query.example ?? "";
  const [about, group] = await Promise.all([ask(`runs/${params.run}`), ask(`runs/${params.run}/group`, { example })]);
  context.crumbs([
    [about.env_id, `#/run/${params.run}`],
    [`example ${group.example_id}`, null],
  ]);
  const rewards = group.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const prompts = new Set(group.rollouts.map((rollout) => JSON.stringify(rollout.prompt)));
  const columns = h(
    "div.side-by-side",
    {},
    group.rollouts.map((rollout) => rolloutColumn(rollout, params.run, { withPrompt: prompts.size > 1 })),
  );
  replace(
    root,
    h(
      "header.page-head",
      {},
      h(
        "div",
        {},
        h("h1", {}, `Example ${group.example_id}`),
        h(
          "p.muted",
          {},
          `${plural(group.total, "rollout")} · mean reward ${number(mean)}${group.total > group.rollouts.length ? ` · the first ${group.rollouts.length} are shown` : ""}`,
        ),
      ),
    ),
    prompts.size === 1
      ? h(
          "details.shared-prompt",
          { open: true },
          h("summary", {}, "Prompt"),
          conversationView(messagesOf(group.rollouts[0].prompt, "user")),
        )
      : null,
    columns,
  );
  let at = -1;
  const move = (by) => {
    const all = [...columns.children];
    at = Math.min(Math.max(at + by, 0), all.length - 1);
    all.forEach((column, i) => column.classList.toggle("selected", i === at));
    all[at]?.scrollIntoView({ inline: "nearest", block: "nearest" });
  };
  context.keys([
    ["l j ArrowRight", "next rollout", () => move(1)],
    ["h k ArrowLeft", "previous rollout", () => move(-1)],
    ["Enter o", "open it", () => columns.querySelector(".selected a.open")?.click()],
    ["Escape u", "back to the run", () => context.go(`#/run/${params.run}`)],
  ]);
}

// One rollout as a column, for a group or for two runs.
export function rolloutColumn(rollout, run, { withPrompt = false, mark = null, letter = null } = {}) {
  const facts = [
    rollout.stop,
    rollout.tokens === null ? null : `${compact(rollout.tokens)} tokens`,
    rollout.time_ms === null ? null : duration(rollout.time_ms),
    rollout.advantage === null ? null : `advantage ${signed(rollout.advantage, 2)}`,
  ];
  return h(
    "section.column",
    {},
    h(
      "header",
      {},
      h(
        "a.open",
        { href: address(`run/${run}/rollout/${rollout.number}`) },
        letter ? h("span.letter", {}, letter) : null,
        `rollout ${rollout.rollout}`,
      ),
      rewardCell(rollout, "", [Math.min(0, rollout.reward ?? 0), Math.max(1, rollout.reward ?? 0)]),
      h("p.muted", {}, facts.filter(Boolean).join(" · ")),
    ),
    rollout.error ? errorCard(rollout.error) : null,
    withPrompt ? conversationView(messagesOf(rollout.prompt, "user")) : null,
    rollout.error && !rollout.completion?.length
      ? null
      : conversationView(messagesOf(rollout.completion, "assistant"), { mark, empty: "The model said nothing." }),
  );
}
