// Questions of the pages → answers, from the server or from the data in the file itself.

import { answerEmbedded, embeddedData } from "./embedded.js";

export class Problem extends Error {}

export async function ask(path, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (embeddedData()) return answerEmbedded(path, Object.fromEntries(known));
  const search = new URLSearchParams(known);
  let response;
  try {
    response = await fetch(`api/${path}${known.length ? `?${search}` : ""}`, { cache: "no-store" });
  } catch {
    throw new Problem("the server does not answer; is `vf view` still running?");
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(found.problem ?? `the server answered with ${response.status}`);
  return found;
}

export function isEmbedded() {
  return embeddedData() !== null;
}

// Calls back while a page is shown, sooner where something happens; a hidden tab waits.
export function poll(signal, everyMs, action) {
  const wait = () => setTimeout(tick, everyMs());
  const tick = async () => {
    if (signal.aborted) return;
    if (!document.hidden) await action().catch(() => {});
    if (!signal.aborted) wait();
  };
  if (!isEmbedded()) wait();
}
