// Messages → a conversation one can read: roles, tool calls, images, reasoning, tokens by logprob.

import { SAFE_IMAGE, appendText, h, visibleText } from "./dom.js";
import { count, number, percent, plainJson, plural } from "./format.js";

const LONG = 8000; // characters shown before one has to ask for more
const MARKUP = /<\/?[a-zA-Z_][\w-]{0,40}\/?>/g;

// A prompt or completion of any kind → [{role, blocks: [{kind, text, …}]}]
export function messagesOf(value, role) {
  if (value === null || value === undefined) return [];
  if (typeof value === "string") return [{ role, blocks: [{ kind: "text", text: value }] }];
  if (!Array.isArray(value)) return [{ role, blocks: [{ kind: "json", text: plainJson(value) }] }];
  return value.map((message) => messageOf(message, role));
}

function messageOf(message, role) {
  if (typeof message === "string") return { role, blocks: [{ kind: "text", text: message }] };
  if (message === null || typeof message !== "object")
    return { role, blocks: [{ kind: "json", text: plainJson(message) }] };
  const blocks = [];
  const reasoning = message.reasoning_content ?? message.reasoning;
  if (reasoning)
    blocks.push({ kind: "reasoning", text: typeof reasoning === "string" ? reasoning : plainJson(reasoning) });
  blocks.push(...contentBlocks(message.content));
  for (const call of [message.tool_calls].flat()) if (call) blocks.push(toolBlock(call));
  if (message.refusal) blocks.push({ kind: "text", text: String(message.refusal) });
  return {
    role: typeof message.role === "string" ? message.role : role,
    name: message.name ?? null,
    callId: message.tool_call_id ?? null,
    blocks,
  };
}

function contentBlocks(content) {
  if (content === null || content === undefined || content === "") return [];
  if (typeof content === "string") return [{ kind: "text", text: content }];
  return [content].flat().map((part) => {
    if (typeof part === "string") return { kind: "text", text: part };
    if (typeof part?.text === "string") return { kind: "text", text: part.text };
    const url = part?.image_url?.url ?? part?.image_url;
    if (typeof url === "string")
      return SAFE_IMAGE.test(url)
        ? { kind: "image", text: "", url }
        : { kind: "text", text: `[image: ${url.slice(0, 200)}]` };
    return { kind: "json", text: plainJson(part) };
  });
}

function toolBlock(call) {
  let data = call;
  if (typeof call === "string") data = parseJson(call) ?? { name: "tool call", arguments: call };
  const called = data.function ?? data;
  const given = called.arguments ?? called.input;
  const parsedArguments = typeof given === "string" ? parseJson(given) : given;
  const text =
    parsedArguments === undefined || parsedArguments === null ? String(given ?? "") : plainJson(parsedArguments);
  return {
    kind: "tool",
    name: String(called.name ?? "tool call"),
    id: data.id ?? null,
    text,
    isBroken: typeof given === "string" && parsedArguments === undefined,
  };
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

// --- showing ------------------------------------------------------------------------------------------------------------

// marks: where the first difference lies, {message, block, offset}; turns: tokens by assistant message
export function conversationView(
  messages,
  { turns = [], mark = null, showTokens = false, find = "", empty = "nothing" } = {},
) {
  let turn = 0;
  if (!messages.length) return h("p.muted.nothing", {}, empty);
  return h(
    "div.conversation",
    {},
    messages.map((message, i) => {
      const tokens = message.role === "assistant" ? turns[turn++] : undefined;
      return messageView(message, {
        tokens: showTokens ? tokens : undefined,
        mark: mark?.message === i ? mark : null,
        find,
      });
    }),
  );
}

const ROLES = ["system", "user", "assistant", "tool"];

function messageView(message, { tokens, mark, find }) {
  const style = ROLES.includes(message.role) ? message.role : "other";
  const label = h(
    "header.role",
    {},
    h("span", {}, message.role || "message"),
    message.name ? h("span.role-detail", {}, message.name) : null,
    message.callId ? h("span.role-detail", {}, message.callId) : null,
  );
  const hasTokens = tokens?.ids?.length > 0;
  const blocks = hasTokens
    ? [tokensView(tokens), message.blocks.filter((block) => block.kind === "tool").map((block) => blockView(block))]
    : message.blocks.map((block, i) => blockView(block, { offset: mark?.block === i ? mark.offset : null, find }));
  const body = h("div.message-body", {}, message.blocks.length || hasTokens ? blocks : h("p.muted", {}, "(nothing)"));
  if (mark && mark.block === null) body.append(differenceFlag());
  return h(`article.message.${style}`, { class: mark ? "differs" : "" }, label, body);
}

function blockView(block, { offset = null, find = "" } = {}) {
  if (block.kind === "image") return h("img.picture", { src: block.url, alt: "an image of the conversation" });
  const text = textView(block.text, { offset, find, isCode: block.kind !== "text" && block.kind !== "reasoning" });
  if (block.kind === "reasoning") return h("details.reasoning", { open: true }, h("summary", {}, "reasoning"), text);
  if (block.kind === "tool") {
    return h(
      "section.tool-call",
      {},
      h(
        "header",
        {},
        h("i.function", {}, "ƒ"),
        h("b", {}, block.name),
        block.isBroken ? h("span.chip.bad", {}, "arguments are no JSON") : null,
        block.id ? h("span.role-detail", {}, block.id) : null,
      ),
      text,
    );
  }
  return text;
}

// Text with its markup set off; from an offset on it is marked as different.
export function textView(text, { offset = null, find = "", isCode = false } = {}) {
  const box = h("div.text", { class: isCode ? "code" : "" });
  const isLong = text.length > LONG * 1.2 && offset === null;
  writeText(box, isLong ? text.slice(0, LONG) : text, offset, find);
  if (isLong) {
    const more = h(
      "button.more",
      { onclick: () => (box.replaceChildren(), writeText(box, text, offset, find)) },
      `Show all ${plural(text.length, "character")}`,
    );
    box.append("… ", more);
  }
  return box;
}

function writeText(box, text, offset, find) {
  if (find) return writeHits(box, text, find);
  if (offset === null) return writeMarkup(box, text);
  writeMarkup(box, text.slice(0, offset));
  box.append(differenceFlag());
  const rest = h("mark.different");
  writeMarkup(rest, text.slice(offset));
  return box.append(rest);
}

// What was searched for, wherever it stands.
function writeHits(box, text, find) {
  const pattern = new RegExp(find.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    writeMarkup(box, text.slice(end, match.index));
    box.append(h("mark.hit", {}, match[0]));
    end = match.index + match[0].length;
  }
  writeMarkup(box, text.slice(end));
}

function differenceFlag() {
  return h("span.difference-flag", { id: "first-difference", title: "the first difference" });
}

function writeMarkup(box, text) {
  let end = 0;
  for (const match of text.matchAll(MARKUP)) {
    appendText(box, text.slice(end, match.index));
    box.append(h("span.markup", {}, match[0]));
    end = match.index + match[0].length;
  }
  appendText(box, text.slice(end));
}

// --- tokens -------------------------------------------------------------------------------------------------------------

function tokensView(turn) {
  const box = h("div.text.tokens");
  turn.ids.forEach((id, i) => {
    const logprob = turn.logprobs[i] ?? null;
    const piece = turn.pieces?.[i];
    const words = `${piece === undefined || piece === null ? "" : `${JSON.stringify(visibleText(piece))}  `}id ${id}${logprob === null ? "" : `  logprob ${number(logprob)}  p ${percent(Math.exp(logprob))}`}`;
    const isId = piece === undefined || piece === null;
    box.append(
      h(
        "span.token",
        { class: `${logprobStyle(logprob)}${isId ? " id" : ""}`, title: words },
        isId ? String(id) : piece,
      ),
    );
  });
  return box;
}

// The less likely a token was, the stronger its colour; eight steps.
export function logprobStyle(logprob) {
  if (logprob === null || logprob === undefined) return "unknown";
  return `p${Math.min(7, Math.floor((1 - Math.exp(Math.min(logprob, 0))) * 8))}`;
}

export function tokensLegend(turns) {
  const logprobs = turns.flatMap((turn) => turn.logprobs).filter((value) => value !== null);
  const mean = logprobs.reduce((sum, value) => sum + value, 0) / (logprobs.length || 1);
  return h(
    "div.tokens-legend",
    {},
    h("span", {}, "certain"),
    [0, 1, 2, 3, 4, 5, 6, 7].map((step) => h("span.token.swatch", { class: `p${step}` }, "  ")),
    h("span", {}, "unlikely"),
    h(
      "span.muted",
      {},
      `${count(turns.reduce((sum, turn) => sum + turn.ids.length, 0))} tokens, mean logprob ${number(mean)}`,
    ),
    turns.some((turn) => turn.ids.length && !turn.pieces)
      ? h("span.muted", {}, "shown by id: the model's tokenizer is not on this machine")
      : null,
  );
}
