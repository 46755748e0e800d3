// Pinned lanes: copies of tracks that stay above the others while these scroll. The address carries them.

const PIN_PX = 20; // at the right end of a lane's label
const MAX_PINS = 12;

/** The layout of the pinned lanes, with heights from the top of their area. */
class PinnedLayout {
  constructor() {
    this.tracks = [];
    this.place([]);
  }

  place(tracks) {
    this.tracks = tracks;
    this.lines = [];
    this.lineOfTrack = new Map();
    this.folded = new Set();
    this.heightPx = 0;
    for (const track of tracks) {
      const heightPx = track.rows * ROW_PX + TRACK_GAP_PX;
      const line = { type: "track", rank: track.rank, track, label: track.order === undefined ? `${track.rank} · ${track.label}` : track.label, y: this.heightPx, heightPx };
      this.lines.push(line);
      this.lineOfTrack.set(track.track, line);
      this.heightPx += heightPx;
    }
  }

  has(track) {
    return this.lineOfTrack.has(track);
  }

  placeOf(track, row, role) {
    return Layout.prototype.placeOf.call(this, track, row, role);
  }

  lineAt(y) {
    return Layout.prototype.lineAt.call(this, y);
  }
}

/** The timeline as its pinned area sees it: another layout, and no scrolling. */
function pinnedArea(timeline) {
  const top = timeline.headPx - timeline.pinned.heightPx;
  const own = { layout: timeline.pinned, headPx: top, heightPx: timeline.headPx, scrolledPx: 0 };
  return Object.create(timeline, Object.fromEntries(Object.entries(own).map(([name, value]) => [name, { value }])));
}

/** The area that a point of the canvas is in: the pinned lanes, or the scrolled ones. */
function areaAt(timeline, point) {
  const isPinned = point.y < timeline.headPx && point.y >= timeline.headPx - timeline.pinned.heightPx;
  return isPinned ? pinnedArea(timeline) : timeline;
}

function togglePin(timeline, track) {
  const { pinned } = timeline;
  const isPinned = pinned.has(track.track);
  if (!isPinned && pinned.tracks.length >= MAX_PINS) return timeline.panel.announce(`At most ${MAX_PINS} lanes can be pinned`);
  pinned.place(isPinned ? pinned.tracks.filter((other) => other !== track) : [...pinned.tracks, track]);
  timeline.panel.announce(`${isPinned ? "Unpinned" : "Pinned"} ${track.label} of ${timeline.rankName(track.rank)}`);
  keepInAddress(timeline, { [timeline.parameter("pins")]: pinned.tracks.map((each) => each.track).join("-") });
  timeline.resize();
  timeline.changed();
}

/** Pin the lane of the selected slice, else the one at the pointer. */
function pinSelected(timeline) {
  const { pointer, selected } = timeline;
  const line = pointer && areaAt(timeline, pointer).layout.lineAt(areaAt(timeline, pointer).contentY(pointer.y));
  const track = selected ? timeline.tracks.get(selected.track) : line?.track;
  if (track) togglePin(timeline, track);
}

/** Pin the lanes that the address names. */
function pinLinked(timeline) {
  const text = new URLSearchParams(address.read()).get(timeline.parameter("pins")) ?? "";
  const numbers = /^\d{1,6}(-\d{1,6})*$/.test(text) ? text.split("-").map(Number) : [];
  timeline.pinned.place([...new Set(numbers)].map((number) => timeline.tracks.get(number)).filter(Boolean).slice(0, MAX_PINS));
}

function paintPinned(timeline) {
  if (!timeline.pinned.heightPx) return;
  const area = pinnedArea(timeline);
  const { ctx, inks, widthPx, headPx, heightPx } = area;
  ctx.save();
  clipTo(ctx, 0, headPx, widthPx, heightPx - headPx);
  ctx.fillStyle = inks.headGround;
  ctx.fillRect(0, headPx, widthPx, heightPx - headPx);
  ctx.fillStyle = inks.rankGround;
  ctx.fillRect(0, headPx, widthPx, heightPx - headPx);
  paintGround(area);
  ctx.save();
  clipTo(ctx, GUTTER_PX, headPx, widthPx - GUTTER_PX, heightPx - headPx);
  paintTiles(area);
  paintMarks(area);
  ctx.restore();
  for (const line of area.layout.lines) paintLabel(area, line);
  ctx.fillStyle = inks.edge;
  ctx.fillRect(0, heightPx - 1, widthPx, 1);
  ctx.restore();
}
