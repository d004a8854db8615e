// One rollout: its conversation, the score of each reward function, timing, and tokens.

import { ask } from "./api.js";
import { copyText } from "./code.js";
import { conversationView, messagesOf, renderedView, textView } from "./conversation.js";
import { h, icon, replace } from "./dom.js";
import { NONE, compact, count, duration, number, plainJson, shortNumber, signed } from "./format.js";
import { address, filtersOf } from "./address.js";
import { card, rewardCell } from "./table.js";
import { TOKEN_VIEWS, tokenFigures, tokensLegend } from "./tokens.js";

export async function rolloutPage(context) {
  const { root, params } = context;
  const [about, found] = await Promise.all([
    ask(`runs/${params.run}`),
    ask(`runs/${params.run}/rollouts/${params.number}`, filtersOf(context.query)),
  ]);
  const { rollout, around } = found;
  const back = address(`run/${params.run}`, filtersOf(context.query));
  context.crumbs([
    [about.env_id, back],
    [`rollout ${count(rollout.number)}`, null],
  ]);
  const figures = tokenFigures(rollout.turns, rollout.advantage);
  const main = h("div.main-column");
  const draw = () => drawConversation(main, rollout, figures, context);
  const hrefTo = (number) => address(`run/${params.run}/rollout/${number}`, filtersOf(context.query));
  const groupHref = address(`run/${params.run}/group`, { example: JSON.stringify(rollout.example_id) });
  replace(
    root,
    rolloutHead(rollout, around, found.group, hrefTo, groupHref, about),
    h("div.with-side", {}, main, side(rollout, about)),
  );
  draw();
  context.keys([
    ["j n", "next rollout", () => around.next !== null && context.go(hrefTo(around.next))],
    ["k p", "previous rollout", () => around.previous !== null && context.go(hrefTo(around.previous))],
    ["g", "its group side by side", () => context.go(groupHref)],
    [
      "t",
      "rendered, source, or tokens by a figure",
      () => {
        const views = ["rendered", "source", ...figures];
        const next = views[(views.indexOf(viewOf(context, figures)) + 1) % views.length];
        context.update({ view: next === "rendered" ? null : next });
        draw();
      },
    ],
    ["y", "copy a link to this rollout", () => root.querySelector("button.share").click()],
    ["Escape u", "back to the run", () => context.go(back)],
  ]);
}

function viewOf(context, figures) {
  const { view } = context.query;
  return view === "source" || figures.includes(view) ? view : "rendered";
}

// A permanent link to a rollout, which stays valid if the run is moved or appended to.
export function rolloutLink(about, rollout) {
  const words = {
    env: about.env_id,
    run: about.name,
    example: JSON.stringify(rollout.example_id),
    rollout: rollout.rollout,
  };
  return `${location.href.split("#", 1)[0]}${address("link", words)}`;
}

function rolloutHead(rollout, around, group, hrefTo, groupHref, about) {
  const share = h(
    "button.share",
    { onclick: () => copyText(rolloutLink(about, rollout), share), title: "copy a link to this rollout (y)" },
    "Copy link",
  );
  const link = (number, name, words) =>
    h(
      "a.button.icon-button",
      {
        href: number === null ? null : hrefTo(number),
        class: number === null ? "off" : "",
        title: words,
        "aria-label": words,
      },
      icon(name),
    );
  return h(
    "header.page-head",
    {},
    h(
      "div",
      {},
      h("h1", {}, `Example ${rollout.example_id}`, h("span.muted", {}, ` · rollout ${rollout.rollout}`)),
      h(
        "p.muted",
        {},
        [
          rollout.task && rollout.task !== "default" ? `task ${rollout.task}` : null,
          rollout.step === null ? null : `step ${shortNumber(rollout.step)}`,
          around.place === null ? null : `${count(around.place + 1)} of ${count(around.total)}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    ),
    h(
      "div.actions",
      {},
      share,
      group.length > 1 ? h("a.button", { href: groupHref }, `Group of ${group.length}`) : null,
      link(around.previous, "left", "previous rollout (k)"),
      link(around.next, "right", "next rollout (j)"),
    ),
  );
}

function drawConversation(main, rollout, figures, context) {
  const view = viewOf(context, figures);
  const set = (name) => () => {
    context.update({ view: name === "rendered" ? null : name });
    drawConversation(main, rollout, figures, context);
  };
  const names = { rendered: "Rendered", source: "Source", ...TOKEN_VIEWS };
  const choice = h(
    "div.choice",
    { role: "group", "aria-label": "how messages are shown" },
    ["rendered", "source", ...figures].map((name) =>
      h("button", { class: name === view ? "active" : "", onclick: set(name) }, names[name]),
    ),
  );
  const find = context.query.q;
  replace(
    main,
    rollout.error ? errorCard(rollout.error) : null,
    h("div.section-head", {}, h("h2", {}, "Prompt"), choice),
    conversationView(messagesOf(rollout.prompt, "user"), {
      find,
      view: view === "source" ? view : "rendered",
      empty: "This rollout was saved without its prompt.",
    }),
    h("div.section-head", {}, h("h2", {}, "Completion")),
    TOKEN_VIEWS[view] ? tokensLegend(rollout.turns, view, rollout.advantage) : null,
    conversationView(messagesOf(rollout.completion, "assistant"), {
      turns: rollout.turns,
      view,
      advantage: rollout.advantage,
      find,
      empty: "The model said nothing.",
    }),
    judgedView(rollout.judged, find),
  );
}

// The prompts to judges and their replies, which explain the reward.
function judgedView(judged, find) {
  if (!judged.length) return null;
  const one = ({ asked, replied }) =>
    h(
      "article.message.judge",
      {},
      h("header.role", {}, h("span", {}, "judge")),
      h(
        "div.message-body",
        {},
        typeof replied === "string" ? renderedView(replied, { find }) : textView(plainJson(replied), { isCode: true }),
        h("details", {}, h("summary", {}, "Prompt of the judge"), textView(asked, { find })),
      ),
    );
  return [
    h(
      "div.section-head",
      {},
      h("h2", {}, judged.length > 1 ? `${judged.length} replies of judges` : "The judge's reply"),
    ),
    h("div.conversation", {}, judged.map(one)),
  ];
}

export function errorCard(error) {
  const blame =
    error.blame === "policy"
      ? "the model caused it, so the rollout is scored"
      : `caused by: ${error.blame ?? "unknown"}, so the rollout has no reward`;
  return h(
    "section.card.error",
    {},
    h("h2", {}, icon("warning"), String(error.type ?? "error")),
    h("p", {}, String(error.message ?? plainJson(error))),
    h("p.muted", {}, blame),
    error.cause
      ? h("p.muted", {}, "cause: ", typeof error.cause === "string" ? error.cause : plainJson(error.cause))
      : null,
    error.traceback ? h("details", {}, h("summary", {}, "Traceback"), h("pre", {}, String(error.traceback))) : null,
  );
}

function side(rollout, about) {
  return h(
    "aside.side",
    {},
    card(
      "Reward",
      h("div.big", {}, rollout.status === "failed" ? h("span.chip.bad", {}, "failed") : number(rollout.reward)),
      metricsList(rollout, about),
      rollout.advantage === null ? null : h("p.muted", {}, `advantage ${signed(rollout.advantage)}`),
    ),
    rollout.answer === "" || rollout.answer === null
      ? null
      : card("Answer", textView(typeof rollout.answer === "string" ? rollout.answer : plainJson(rollout.answer))),
    card("Facts", facts(rollout), timeline(rollout)),
    hasKeys(rollout.info)
      ? card(
          "Info",
          textView(typeof rollout.info === "string" ? rollout.info : plainJson(rollout.info), { isCode: true }),
        )
      : null,
    Object.entries(rollout.columns).map(([name, value]) =>
      h(
        "section.card",
        {},
        h(
          "details",
          {},
          h("summary", {}, name),
          textView(typeof value === "string" ? value : plainJson(value), { isCode: true }),
        ),
      ),
    ),
    hasKeys(about.metadata.sampling_args)
      ? card("Sampling", textView(plainJson(about.metadata.sampling_args), { isCode: true }))
      : null,
  );
}

function metricsList(rollout, about) {
  // A training may change its weights by step; the page of reward functions shows them.
  const weights = (about.kind === "training" ? null : about.metadata.reward_weights) ?? {};
  const weight = (name) =>
    typeof weights[name] === "number" ? h("span.muted", {}, ` × ${shortNumber(weights[name])}`) : null;
  const names = Object.keys(rollout.metrics);
  if (!names.length) return null;
  return h(
    "table.small",
    {},
    h(
      "tbody",
      {},
      names.map((name) =>
        h(
          "tr",
          {},
          h("td.word", { title: name }, name, weight(name)),
          h(
            "td",
            {},
            rollout.metrics[name] === null
              ? NONE
              : rewardCell({ reward: rollout.metrics[name] }, "", [
                  Math.min(0, rollout.metrics[name]),
                  Math.max(1, rollout.metrics[name]),
                ]),
          ),
        ),
      ),
    ),
  );
}

function facts(rollout) {
  const usage = rollout.usage ?? {};
  const pairs = [
    ["stopped by", [rollout.stop || NONE, rollout.is_truncated ? h("span.chip.warn", {}, "cut off") : null]],
    ["turns", rollout.turns.length ? count(rollout.turns.length) : null],
    ["prompt tokens", usage.prompt_tokens === undefined ? null : compact(usage.prompt_tokens)],
    ["completion tokens", usage.completion_tokens === undefined ? null : compact(usage.completion_tokens)],
    ["cost", usage.cost_usd ? `$${usage.cost_usd}` : null],
    ["place in the file", `record ${count(rollout.number + 1)}`],
  ];
  return h(
    "dl.facts",
    {},
    pairs.filter(([, value]) => value !== null).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

function timeline(rollout) {
  const parts = [
    ["generation", rollout.generation_ms],
    ["scoring", rollout.scoring_ms],
  ].filter(([, ms]) => ms !== null);
  const total = Math.max(
    rollout.time_ms ?? 0,
    parts.reduce((sum, [, ms]) => sum + ms, 0),
  );
  if (!parts.length || !total) return null;
  const segment = ([name, ms]) => {
    const bar = h(`span.segment.${name}`, { title: `${name} ${duration(ms)}` });
    bar.style.width = `${(100 * ms) / total}%`;
    return bar;
  };
  return h(
    "div.timeline",
    {},
    h("div.segments", {}, parts.map(segment)),
    h(
      "div.segment-names",
      {},
      parts.map(([name, ms]) => h(`span.${name}`, {}, `${name} ${duration(ms)}`)),
      h("span.muted", {}, `total ${duration(total)}`),
    ),
  );
}

function hasKeys(value) {
  return value !== null && value !== undefined && (typeof value !== "object" || Object.keys(value).length > 0);
}
