// Formats numbers, times and names.

export const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-3))
    return value
      .toExponential(2)
      .replace("e+", "e")
      .replace(/\.?0+e/, "e")
      .replaceAll("-", "−");
  if (Math.abs(value) >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return value.toFixed(digits).replace("-", "−");
}

// As short as possible: 1, 0.5, 0.333
export function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en").replace("-", "−");
  return number(value)
    .replace(/(\.\d*?)0+$/, "$1")
    .replace(/\.$/, "");
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

export function compact(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 1000) return shortNumber(value);
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined || Number.isNaN(share)) return NONE;
  return `${(100 * share).toFixed(share > 0 && share < 0.001 ? 2 : digits).replace(/\.0$/, "")}%`;
}

export function plural(n, word, words = `${word}s`) {
  return `${count(n)} ${n === 1 ? word : words}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${seconds % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(seconds, now = Date.now() / 1000) {
  if (!seconds) return NONE;
  const age = Math.max(0, now - seconds);
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86_400) return `${Math.floor(age / 3600)} h ago`;
  if (age < 86_400 * 14) return `${Math.floor(age / 86_400)} d ago`;
  return new Date(seconds * 1000).toISOString().slice(0, 10);
}

export function dateTime(text) {
  const date = new Date(text);
  if (!text || Number.isNaN(date.getTime())) return text || NONE;
  return date.toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    year: "numeric",
    hour: "2-digit",
    minute: "2-digit",
  });
}

export function money(usd) {
  return usd === null || usd === undefined ? NONE : `$${usd.toFixed(usd < 1 ? 4 : 2)}`;
}

export function plainJson(value) {
  return JSON.stringify(value, null, 2) ?? "";
}

// An interval, with as many digits as its mean.
export function between(low, high, digits = 3) {
  if (low === null || low === undefined || high === null || high === undefined) return "";
  const text = (value) => (Math.abs(value) < 1000 ? value.toFixed(digits) : number(value)).replace("-", "−");
  return `${text(low)} – ${text(high)}`;
}

// The note after a p-value that is corrected for several comparisons.
export function correctedFor(n, words = "") {
  return n > 1 ? ` corrected for ${n}${words} (Holm)` : "";
}
