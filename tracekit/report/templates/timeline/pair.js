// Two runs side by side: each lane of the second directly below the same lane of the first, both from the same moment.

class PairLayout extends Layout {
  /** A line with the steps of each run on top, then the devices and host threads of both, lane by lane. */
  place() {
    this.lines = [];
    this.lineOfTrack = new Map();
    this.partOfRank = new Map();
    this.heightPx = 0;
    for (const rank of this.ranks.keys()) {
      const top = this.heightPx;
      this.add({ type: "rank", rank, label: this.places[rank] }, RANK_PX);
      if (this.unitRanks.has(rank)) this.add({ type: "units", rank, label: "units" }, UNITS_PX);
      this.partOfRank.set(rank, { top, bottom: this.heightPx });
    }
    this.keys = [];
    for (const [group, tracks] of this.groups()) this.addGroup(group, tracks);
  }

  /** The tracks of both runs by group, in the order in which the server sent them. */
  groups() {
    const groups = new Map();
    const tracks = [...this.ranks.values()].flatMap((of) => [...of.values()].flat());
    for (const track of tracks.sort((a, b) => a.order - b.order)) entry(groups, track.group, () => []).push(track);
    return groups;
  }

  addGroup(group, tracks) {
    this.keys.push(group);
    this.add({ type: "group", key: group, rank: tracks[0].rank, label: group }, GROUP_PX);
    if (this.folded.has(group)) return;
    for (const track of tracks) {
      const line = this.add({ type: "track", rank: track.rank, track, label: track.label }, track.rows * ROW_PX + TRACK_GAP_PX);
      this.lineOfTrack.set(track.track, line);
    }
  }

  initiallyFolded() {
    return [];
  }

  toggleAll() {
    const isOpen = this.keys.some((key) => !this.folded.has(key));
    this.foldAll(isOpen ? this.keys : []);
  }

  reveal(track) {
    this.folded.delete(track.group);
    this.place();
  }
}

/** Another scene takes the place of one: what is selected is not in it. */
function replaceScene(timeline, before) {
  if (timeline.pair) timeline.layout.foldAll(before.folded);
  Object.assign(timeline, { selected: null, arrows: [], arrowEnds: [], sentAddress: null });
  clearRange(timeline);
  timeline.panel.showDetails(null);
}

/** Request the next (1) or the previous (-1) step of both runs. */
function stepBoth(timeline, by) {
  // Streamlit does not deliver a message that equals the previous one, and a new timeline must not repeat a number.
  if (timeline.pair) timeline.send("step", { by, number: `${Date.now()}-${timeline.seq}` });
}

/** The moment at which both steps begin. */
function paintPair(timeline) {
  const { ctx, pair, inks, headPx, heightPx, widthPx } = timeline;
  if (!pair) return;
  const x = timeline.xOf(timeline.zeroNs);
  if (x < GUTTER_PX || x > widthPx) return;
  ctx.strokeStyle = inks.text;
  ctx.lineWidth = 1;
  ctx.setLineDash([4, 3]);
  ctx.beginPath();
  ctx.moveTo(Math.round(x) + 0.5, headPx);
  ctx.lineTo(Math.round(x) + 0.5, heightPx);
  ctx.stroke();
  ctx.setLineDash([]);
}

/** Whether a band is one of the two steps that are compared. */
function isCompared(timeline, band) {
  return Boolean(timeline.pair) && band.kind === "step" && band.name === timeline.pair.steps[band.rank];
}
