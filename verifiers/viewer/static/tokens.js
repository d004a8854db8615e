// Renders the tokens of a turn coloured by logprob, advantage, or probability ratio.

import { h, visibleText } from "./dom.js";
import { count, number, percent, shortNumber, signed } from "./format.js";

export const TOKEN_VIEWS = { logprob: "Logprob", advantage: "Advantage", ratio: "Ratio" };

// The values available for these turns; an advantage belongs to the rollout or to a turn.
export function tokenFigures(turns, advantage) {
  const withTokens = turns.filter((turn) => turn.ids.length);
  if (!withTokens.length) return [];
  const has = {
    logprob: withTokens.some((turn) => turn.logprobs.length),
    advantage: advantage !== null || withTokens.some((turn) => turn.advantage !== null),
    ratio: withTokens.some((turn) => turn.ratios.length),
  };
  return Object.keys(TOKEN_VIEWS).filter((name) => has[name]);
}

export function tokensView(turn, view, advantage = null) {
  const box = h("div.text.tokens");
  const own = turn.advantage ?? advantage;
  turn.ids.forEach((id, i) => {
    const [logprob, ratio] = [turn.logprobs[i] ?? null, turn.ratios[i] ?? null];
    const piece = turn.pieces?.[i];
    const isId = piece === undefined || piece === null;
    const facts = [
      isId ? null : JSON.stringify(visibleText(piece)),
      `id ${id}`,
      logprob === null ? null : `logprob ${number(logprob)}  p ${percent(Math.exp(logprob))}`,
      own === null ? null : `advantage ${signed(own)}`,
      ratio === null ? null : `ratio ${number(ratio, 4)}`,
    ];
    const style = { logprob: logprobStyle(logprob), advantage: advantageStyle(own), ratio: ratioStyle(ratio) }[view];
    box.append(
      h(
        "span.token",
        { class: `${style}${isId ? " id" : ""}`, title: facts.filter(Boolean).join("  ") },
        isId ? String(id) : piece,
      ),
    );
  });
  return box;
}

// The less likely a token was, the stronger its colour, in eight steps.
export function logprobStyle(logprob) {
  if (logprob === null || logprob === undefined) return "unknown";
  return `p${Math.min(7, Math.floor((1 - Math.exp(Math.min(logprob, 0))) * 8))}`;
}

// Better or worse than its group, in four strengths up to one standard deviation or one point.
export function advantageStyle(advantage) {
  if (advantage === null || advantage === undefined) return "unknown";
  if (advantage === 0) return "even";
  return `${advantage > 0 ? "up" : "down"}${Math.min(4, Math.ceil(Math.abs(advantage) * 4))}`;
}

// How far the probability has changed since the token was sampled; a change of 0.2 (the usual clip) is the third strength.
export function ratioStyle(ratio) {
  if (ratio === null || ratio === undefined || !(ratio > 0)) return "unknown";
  const far = Math.abs(Math.log(ratio));
  if (far < 0.005) return "even";
  return `${ratio > 1 ? "up" : "down"}${far < 0.05 ? 1 : far < 0.18 ? 2 : far < 0.5 ? 3 : 4}`;
}

const ENDS = {
  logprob: ["certain", "unlikely", ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"]],
  advantage: [
    "worse than its group",
    "better",
    ["down4", "down3", "down2", "down1", "even", "up1", "up2", "up3", "up4"],
  ],
  ratio: [
    "less likely now",
    "more likely now",
    ["down4", "down3", "down2", "down1", "even", "up1", "up2", "up3", "up4"],
  ],
};

export function tokensLegend(turns, view, advantage) {
  const [low, high, steps] = ENDS[view];
  const n = turns.reduce((sum, turn) => sum + turn.ids.length, 0);
  return h(
    "div.tokens-legend",
    {},
    h("span", {}, low),
    steps.map((step) => h("span.token.swatch", { class: step }, "  ")),
    h("span", {}, high),
    h("span.muted", {}, `${count(n)} tokens, ${inWords(turns, view, advantage)}`),
    turns.some((turn) => turn.ids.length && !turn.pieces)
      ? h("span.muted", {}, "shown by id: the model's tokenizer is not on this machine")
      : null,
  );
}

function inWords(turns, view, advantage) {
  const mean = (name) => {
    const known = turns.flatMap((turn) => turn[name]).filter((value) => value !== null);
    return known.reduce((sum, value) => sum + value, 0) / (known.length || 1);
  };
  if (view === "logprob") return `mean logprob ${number(mean("logprobs"))}`;
  if (view === "advantage") return `advantage ${shortNumber(advantage)}: the same for all tokens`;
  const most = turns.flatMap((turn) => turn.ratios).reduce((a, b) => (b === null ? a : Math.max(a, b)), -Infinity);
  return `in the last pass of the update: mean ratio ${number(mean("ratios"), 4)}, largest ${number(most, 4)}`;
}
