// What the page around the timeline gives and takes: its colours, its address.

/** The colours that a theme decides, and those of the one palette that all figures share. */
function inksOf(root, colours) {
  const style = getComputedStyle(root);
  const of = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ...colours,
    text: of("--st-text-color", "#1b2330"),
    ground: of("--st-background-color", "#ffffff"),
    headGround: of("--st-background-color", "#ffffff"),
    rankGround: of("--st-secondary-background-color", "#f2f5f8"),
    groupGround: "rgba(128, 138, 150, 0.06)",
    faintText: of("--st-text-color", "#1b2330"),
    arrow: of("--st-text-color", "#1b2330"),
    grid: "rgba(128, 138, 150, 0.18)",
    edge: "rgba(128, 138, 150, 0.6)",
    step: "rgba(128, 138, 150, 0.25)",
    unit: "rgba(128, 138, 150, 0.28)",
    range: "rgba(86, 180, 233, 0.22)",
  };
}

/** Put the view into the address, so that it can be sent. Replaced, not added: Back leads to the page before. */
function showInAddress(start, end) {
  const told = { from: start, to: end };
  // In place: where the server finds the same parameters in the same order, it has nothing to add to the history.
  const parts = location.search.slice(1).split("&").filter(Boolean);
  for (const [name, ns] of Object.entries(told)) {
    const at = parts.findIndex((part) => part.startsWith(`${name}=`));
    parts[at < 0 ? parts.length : at] = `${name}=${ns}`;
  }
  history.replaceState(history.state, "", `${location.pathname}?${parts.join("&")}${location.hash}`);
}
