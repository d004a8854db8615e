// Writes the choices made on a page into the URL's fragment.

export const FILTERS = ["q", "status", "task", "stop", "cause", "low", "high", "truncated", "step", "sort", "desc"];

export function filtersOf(query) {
  return Object.fromEntries(Object.entries(query).filter(([name]) => FILTERS.includes(name)));
}

export function address(path, query = {}) {
  const search = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  return `#/${path}${search.size ? `?${search}` : ""}`;
}
