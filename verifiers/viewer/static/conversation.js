// Renders messages as a conversation: roles, tool calls, images, reasoning, tokens coloured by logprob.

import { codeBlock } from "./code.js";
import { SAFE_IMAGE, h } from "./dom.js";
import { plainJson, plural } from "./format.js";
import { markdownView, writeTags } from "./markdown.js";
import { tokensView } from "./tokens.js";

const LONG = 8000; // characters shown before the "Show all" button
const LONGEST_JSON = 100_000;

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

// mark: the first difference, {message, block, offset}; turns: tokens by assistant message;
// view: "rendered", "source", or a value of tokens ("logprob", "advantage", "ratio")
export function conversationView(
  messages,
  { turns = [], mark = null, view = "rendered", advantage = null, find = "", empty = "nothing" } = {},
) {
  let turn = 0;
  if (!messages.length) return h("p.muted.nothing", {}, empty);
  return h(
    "div.conversation",
    {},
    messages.map((message, i) => {
      const tokens = message.role === "assistant" ? turns[turn++] : undefined;
      return messageView(message, { tokens, mark: mark?.message === i ? mark : null, find, view, advantage });
    }),
  );
}

const ROLES = ["system", "user", "assistant", "tool"];

function messageView(message, { tokens, mark, find, view, advantage }) {
  const style = ROLES.includes(message.role) ? message.role : "other";
  const label = h(
    "header.role",
    {},
    h("span", {}, message.role || "message"),
    message.name ? h("span.role-detail", {}, message.name) : null,
    message.callId ? h("span.role-detail", {}, message.callId) : null,
  );
  const hasTokens = view !== "rendered" && view !== "source" && tokens?.ids?.length > 0;
  const isRendered = view !== "source";
  const isTool = message.role === "tool";
  const blocks = hasTokens
    ? [
        tokensView(tokens, view, advantage),
        message.blocks.filter((block) => block.kind === "tool").map((block) => blockView(block)),
      ]
    : message.blocks.map((block, i) =>
        blockView(block, { offset: mark?.block === i ? mark.offset : null, find, isRendered, isTool }),
      );
  const body = h("div.message-body", {}, message.blocks.length || hasTokens ? blocks : h("p.muted", {}, "(nothing)"));
  if (mark && mark.block === null) body.append(differenceFlag());
  return h(`article.message.${style}`, { class: mark ? "differs" : "" }, label, body);
}

function blockView(block, { offset = null, find = "", isRendered = false, isTool = false } = {}) {
  if (block.kind === "image") return h("img.picture", { src: block.url, alt: "an image of the conversation" });
  const isProse = block.kind === "text" || block.kind === "reasoning";
  const text =
    isProse && isRendered && offset === null
      ? renderedView(block.text, { find, isTool })
      : textView(block.text, { offset, find, isCode: !isProse });
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
        block.isBroken ? h("span.chip.bad", {}, "arguments are not JSON") : null,
        block.id ? h("span.role-detail", {}, block.id) : null,
      ),
      text,
    );
  }
  return text;
}

// Text as markdown; JSON returned by a tool as code.
export function renderedView(text, { find = "", isTool = false } = {}) {
  const json = isTool && text.length < LONGEST_JSON && /^\s*[[{]/.test(text) ? parseJson(text) : undefined;
  if (json !== undefined && !find) return codeBlock(plainJson(json), "json");
  const write = find ? (node, part) => writeHits(node, part, find) : writeTags;
  const isLong = text.length > LONG * 1.2;
  const box = markdownView(isLong ? text.slice(0, LONG) : text, { write });
  if (isLong) {
    const all = () => box.replaceWith(markdownView(text, { write }));
    box.append(h("button.more", { onclick: all }, `Show all ${plural(text.length, "character")}`));
  }
  return box;
}

// Source text with its tags highlighted; from an offset on it is marked as different.
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
  if (offset === null) return writeTags(box, text);
  writeTags(box, text.slice(0, offset));
  box.append(differenceFlag());
  const rest = h("mark.different");
  writeTags(rest, text.slice(offset));
  return box.append(rest);
}

// Highlights all matches of the search text.
function writeHits(box, text, find) {
  const pattern = new RegExp(find.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    writeTags(box, text.slice(end, match.index));
    box.append(h("mark.hit", {}, match[0]));
    end = match.index + match[0].length;
  }
  writeTags(box, text.slice(end));
}

function differenceFlag() {
  return h("span.difference-flag", { id: "first-difference", title: "the first difference" });
}
