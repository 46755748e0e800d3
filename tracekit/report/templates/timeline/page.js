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

/** Where the parameters of the view are: the address of the page. A page that holds its data replaces this. */
let address = {
  read: () => location.search,
  write: (search) => history.replaceState(history.state, "", `${location.pathname}?${search}${location.hash}`),
};

/** Put parameters into the address, so that it can be shared; null removes one. It adds no history entry. */
function showInAddress(parameters) {
  // In place: the server adds a history entry if the order of the parameters changes.
  const parts = address.read().slice(1).split("&").filter(Boolean);
  for (const [name, value] of Object.entries(parameters)) {
    const at = parts.findIndex((part) => part.startsWith(`${name}=`));
    if (value === null || value === "") at < 0 || parts.splice(at, 1);
    else parts[at < 0 ? parts.length : at] = `${name}=${encodeURIComponent(value)}`;
  }
  address.write(parts.join("&"));
}

const RESTORE_MS = 1000;

/** Put parameters that only the browser writes into the address, where they stay until this changes them. */
function keepInAddress(timeline, parameters) {
  for (const [name, value] of Object.entries(parameters)) timeline.inAddress.set(name, value || null);
  showInAddress(parameters);
}

/** Put them there again: the server may have replaced the address by one from before they were. */
function restoreAddress(timeline) {
  const shown = new URLSearchParams(address.read());
  const lost = [...timeline.inAddress].filter(([name, value]) => shown.get(name) !== value);
  if (lost.length && timeline.root.isConnected) showInAddress(Object.fromEntries(lost));
}
