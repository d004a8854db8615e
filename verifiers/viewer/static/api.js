// Requests of the pages, answered by the server or from the data embedded in an exported file.

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
    throw new Problem("the server does not respond; is `vf view` still running?");
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(found.problem ?? `the server answered with ${response.status}`);
  return found;
}

export function isEmbedded() {
  return embeddedData() !== null;
}

// Polls while a page is shown, more often while something changes; a hidden tab does not poll.
export function poll(signal, everyMs, action) {
  const wait = () => setTimeout(tick, everyMs());
  const tick = async () => {
    if (signal.aborted) return;
    if (!document.hidden) await action().catch(() => {});
    if (!signal.aborted) wait();
  };
  if (!isEmbedded()) wait();
}
