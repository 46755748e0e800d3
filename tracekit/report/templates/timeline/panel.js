// Around the canvas: search, tooltip, the details of a slice, the list of keys. All text is set as textContent.

const SEARCH_DELAY_MS = 250;
const MAX_TIP_CHARACTERS = 400;

/** A new element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

class Panel {
  constructor(timeline) {
    this.timeline = timeline;
    const find = (selector) => timeline.root.querySelector(selector);
    this.tip = find(".tip");
    this.details = find(".details");
    this.help = find(".help");
    this.search = find(".search input");
    this.count = find(".search .count");
    this.legend = find(".legend");
    this.live = find(".live");
    this.status = find(".status");
    this.listenToSearch();
    const actions = {
      previous: () => timeline.stepMatch(-1),
      next: () => timeline.stepMatch(1),
      in: () => timeline.zoom(ZOOM_STEP),
      out: () => timeline.zoom(1 / ZOOM_STEP),
      steps: () => timeline.fitSteps(),
      fit: () => timeline.fitAll(),
      fold: () => timeline.toggleAll(),
      keys: () => this.toggleHelp(),
    };
    for (const [name, act] of Object.entries(actions)) find(`button.${name}`).addEventListener("click", act);
    const rows = KEYS.map(([keys, action]) => make("tr", {}, make("th", { scope: "row" }, keys), make("td", {}, action)));
    this.help.querySelector("table").replaceChildren(...rows);
    this.help.querySelector("button").addEventListener("click", () => this.toggleHelp());
  }

  listenToSearch() {
    let timer = 0;
    this.search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.timeline.find(this.search.value), SEARCH_DELAY_MS);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.timeline.stepMatch(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") this.timeline.root.focus();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  focusSearch() {
    this.search.focus();
    this.search.select();
  }

  showCount(text) {
    this.count.textContent = text;
  }

  announce(text) {
    this.live.textContent = text;
  }

  showStatus(text) {
    this.status.textContent = text;
  }

  toggleHelp() {
    this.help.hidden = !this.help.hidden;
    if (this.help.hidden) this.timeline.root.focus({ preventScroll: true });
    else this.help.querySelector("button").focus({ preventScroll: true });
  }

  showTip(point, lines) {
    const parts = lines.map((line, number) => make(number ? "span" : "b", {}, shortened(line, MAX_TIP_CHARACTERS)));
    this.tip.replaceChildren(...parts);
    this.tip.hidden = false;
    const { widthPx, heightPx } = this.timeline;
    const left = Math.min(point.x + 14, widthPx - this.tip.offsetWidth - 8);
    const below = point.y + 18 + this.tip.offsetHeight < heightPx;
    this.tip.style.left = `${Math.max(left, 4)}px`;
    this.tip.style.top = `${below ? point.y + 18 : Math.max(point.y - this.tip.offsetHeight - 8, 0)}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  showLegend(kinds) {
    this.legend.replaceChildren(
      ...kinds.map((kind) => {
        const mark = make("i");
        mark.style.background = kind.colour;
        return make("span", {}, mark, kind.label);
      }),
    );
  }

  /** Show the selected slice: what the tile contains at once, and the rest when the server has answered. */
  showDetails(slice, details, arrows) {
    this.setContent(slice ? "slice" : null);
    if (!slice) return;
    const close = make("button", { class: "close", "aria-label": "Close the details", onclick: () => this.timeline.clearSelection() }, "×");
    const [, ...known] = aboutSlice(this.timeline, slice);
    const { mark } = slice; // of the finding that the slice was selected for
    const title = mark ? `${mark.severity} ${mark.finding}`.trim() : slice.name;
    const finding = mark ? [make("p", {}, mark.title), make("h5", {}, slice.name)] : [];
    const parts = [make("header", {}, make("h4", {}, title), close), ...finding, ...known.map((line) => make("p", {}, line))];
    if (slice.id === MERGED) {
      parts.push(make("button", { onclick: () => this.timeline.fit(slice) }, "Zoom in to see each of them"));
    } else if (!details) {
      parts.push(make("p", { class: "waiting" }, "Reading the details from the trace …"));
    } else {
      parts.push(this.tableOf(details), ...this.linksOf(slice, arrows));
    }
    this.details.replaceChildren(...parts);
  }

  /** A slice or a finding stands beside the plot where there is room, a range with its wide tables below it. */
  setContent(kind) {
    this.isOfRange = kind === "range";
    this.details.hidden = !kind;
    this.details.classList.toggle("range", this.isOfRange);
  }

  showFinding(mark) {
    this.setContent("finding");
    const close = make("button", { class: "close", "aria-label": "Close the finding", onclick: () => this.timeline.clearSelection() }, "×");
    const place = mark.rank === null ? "" : `rank ${mark.rank} · `;
    const time = `${place}${durationText(mark.end - mark.start)} from ${this.timeline.moment(mark.start)}`;
    const head = make("header", {}, make("h4", {}, `${mark.severity} ${mark.finding}`.trim()), close);
    this.details.replaceChildren(head, make("p", {}, mark.title), make("p", {}, time));
  }

  showRange(range, totals) {
    this.setContent("range");
    const close = make("button", { class: "close", "aria-label": "Close the range", onclick: () => this.timeline.clearSelection() }, "×");
    const title = `Range from ${this.timeline.moment(range.from)} to ${this.timeline.moment(range.to)} (${durationText(range.to - range.from)})`;
    const focused = this.details.getRootNode().activeElement;
    const isTyping = focused?.classList.contains("note");
    this.details.replaceChildren(make("header", {}, make("h4", {}, title), close), ...rangeParts(this.timeline, range, totals));
    if (isTyping) this.details.querySelector(".note").focus();
  }

  offerSteps(areMarked) {
    this.timeline.root.querySelector("button.steps").hidden = !areMarked;
  }

  tableOf(details) {
    const rows = details.map(({ label, value, slice }) => {
      const cell = slice ? this.linkTo(slice, value) : value;
      return make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, cell));
    });
    return make("table", {}, ...rows);
  }

  /** The other ends of the arrows, as buttons. */
  linksOf(slice, arrows) {
    const links = arrows.map((arrow) => {
      const isFrom = isSame(arrow.from, slice);
      const other = isFrom ? arrow.to : arrow.from;
      const track = this.timeline.trackOf(other.track);
      const text = `${isFrom ? "→" : "←"} ${this.timeline.rankName(track.rank)} · ${track.label} · ${other.name}`;
      return make("li", {}, make("small", {}, `${arrow.how} `), this.linkTo(other, text));
    });
    return links.length ? [make("h5", {}, "Arrows"), make("ul", {}, ...links)] : [];
  }

  linkTo(slice, text) {
    return make("button", { class: "link", onclick: () => this.timeline.goToSlice(slice) }, text);
  }
}
