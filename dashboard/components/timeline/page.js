// The page around the timeline: its theme colours and its address.

/** The colours of the theme and of the palette that all figures share. */
function themeColours(root, colours) {
  const style = getComputedStyle(root);
  const of = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
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

/** Put the view into the address, so that it can be shared. It adds no history entry: Back opens the previous page. */
function showInAddress(start, end) {
  // In place: the server adds a history entry if the order of the parameters changes.
  const parts = location.search.slice(1).split("&").filter(Boolean);
  for (const [name, ns] of Object.entries({ from: start, to: end })) {
    const at = parts.findIndex((part) => part.startsWith(`${name}=`));
    parts[at < 0 ? parts.length : at] = `${name}=${ns}`;
  }
  history.replaceState(history.state, "", `${location.pathname}?${parts.join("&")}${location.hash}`);
}
