// Renders source code, highlighted by a scanner for strings, comments, numbers and names.

import { appendText, h } from "./dom.js";

const LONGEST_COLOURED = 100_000;
const HASH_COMMENTS = new Set([
  "python",
  "py",
  "sh",
  "bash",
  "shell",
  "yaml",
  "yml",
  "toml",
  "ruby",
  "rb",
  "r",
  "make",
]);
const SLASH_COMMENTS = new Set(
  "js javascript ts typescript jsx tsx c cpp c++ java go rust rs swift kotlin php scala css json".split(" "),
);
const NAMES_THAT_MATTER = new Set(
  "and as assert async await break case catch class const continue def default del do elif else enum except export extends false False finally fn for from func function global if impl import in interface is lambda let match mod mut new nil None nonlocal not null or package pass print private pub public raise return self static struct super switch this throw trait true True try type undefined use using var void while with yield".split(
    " ",
  ),
);
// Strings end at the end of the line, so that a lone quote affects only that; the pattern is unambiguous (no backtracking).
const TOKEN =
  /(#[^\n]*)|(\/\/[^\n]*)|("(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|`(?:[^`\\\n]|\\.)*`?)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

export function codeBlock(text, language = "") {
  const code = h("pre.code");
  writeCode(code, text, language.toLowerCase());
  const copy = h("button.copy", { onclick: () => copyText(text, copy), title: "copy" }, "Copy");
  return h("figure.code-block", {}, h("figcaption", {}, h("span", {}, language || "code"), copy), code);
}

export function writeCode(node, text, language) {
  if (text.length > LONGEST_COLOURED || language === "text") return appendText(node, text);
  let end = 0;
  const put = (style, part, at) => {
    appendText(node, text.slice(end, at));
    const mark = h(`span.${style}`);
    appendText(mark, part);
    node.append(mark);
    end = at + part.length;
  };
  for (const match of text.matchAll(TOKEN)) {
    const [part, hash, slashes, string, figure, name] = match;
    if (match.index < end) continue;
    if (hash && (HASH_COMMENTS.has(language) || !language)) put("code-comment", part, match.index);
    else if (slashes && SLASH_COMMENTS.has(language)) put("code-comment", part, match.index);
    else if (string && string.length > 1) put("code-string", part, match.index);
    else if (figure) put("code-number", part, match.index);
    else if (name && NAMES_THAT_MATTER.has(name)) put("code-name", part, match.index);
  }
  return appendText(node, text.slice(end));
}

// If writing to the clipboard is not permitted (plain HTTP from another machine), show the text to be selected.
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1500);
  } catch {
    const box = h("textarea.copied", { rows: 3, readonly: true, "aria-label": "to be copied by hand" });
    box.value = text;
    button.after(box);
    box.select();
  }
}
