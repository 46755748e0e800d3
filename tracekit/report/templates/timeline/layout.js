// The vertical layout: ranks, their groups and tracks, and which of them are folded.

const ROW_PX = 17;
const TRACK_GAP_PX = 5;
const RANK_PX = 22;
const UNITS_PX = 15;
const GROUP_PX = 18;
const STRIP_PX = 18;
const MAX_OPEN_HOSTS = 1;

class Layout {
  /** `tracks` from top to bottom; `unitRanks`: the ranks that have bands of units; `places` of ranks in the mesh. */
  constructor(tracks, unitRanks, places = {}) {
    this.places = places;
    this.ranks = new Map();
    for (const track of tracks) {
      const groups = entry(this.ranks, track.rank, () => new Map());
      entry(groups, track.group, () => []).push(track);
    }
    this.unitRanks = new Set(unitRanks);
    this.folded = new Set(this.initiallyFolded());
    this.place();
  }

  /** With several ranks the host threads are folded, so that the devices are next to each other. */
  initiallyFolded() {
    if (this.ranks.size <= MAX_OPEN_HOSTS) return [];
    const keys = [];
    for (const [rank, groups] of this.ranks) {
      for (const [group, tracks] of groups) {
        if (tracks.every((track) => track.role === "host")) keys.push(groupKey(rank, group));
      }
    }
    return keys;
  }

  place() {
    this.lines = [];
    this.lineOfTrack = new Map();
    this.partOfRank = new Map();
    this.heightPx = 0;
    for (const [rank, groups] of this.ranks) {
      const part = entry(this.partOfRank, rank, () => ({ top: this.heightPx }));
      this.add({ type: "rank", key: rankKey(rank), rank, label: this.rankLabel(rank) }, RANK_PX);
      if (this.folded.has(rankKey(rank))) this.addStrip(rank, groups);
      else this.addGroups(rank, groups);
      part.bottom = this.heightPx;
    }
  }

  rankLabel(rank) {
    return this.places[rank] ? `${rankKey(rank)} · ${this.places[rank]}` : rankKey(rank);
  }

  addGroups(rank, groups) {
    if (this.unitRanks.has(rank)) this.add({ type: "units", rank, label: "units" }, UNITS_PX);
    for (const [group, tracks] of groups) {
      const key = groupKey(rank, group);
      this.add({ type: "group", key, rank, label: group }, GROUP_PX);
      if (this.folded.has(key)) continue;
      for (const track of tracks) {
        const line = this.add({ type: "track", rank, track, label: track.label }, track.rows * ROW_PX + TRACK_GAP_PX);
        this.lineOfTrack.set(track.track, line);
      }
    }
  }

  /** A folded rank still shows the work of its devices: compute above, everything else below. */
  addStrip(rank, groups) {
    const work = [...groups.values()].flat().filter((track) => track.role !== "host");
    if (!work.length) return;
    const line = this.add({ type: "strip", rank, label: "" }, STRIP_PX + TRACK_GAP_PX);
    for (const track of work) this.lineOfTrack.set(track.track, line);
  }

  add(line, heightPx) {
    const placed = { ...line, y: this.heightPx, heightPx };
    this.lines.push(placed);
    this.heightPx += heightPx;
    return placed;
  }

  /** Top and height in px of one row of a track; null if it is folded. */
  placeOf(track, row, role) {
    const line = this.lineOfTrack.get(track);
    if (!line) return null;
    // Rows beyond the limit would overlap the tracks below.
    if (row >= line.track?.rows) return null;
    if (line.type === "track") return { y: line.y + row * ROW_PX, heightPx: ROW_PX - 1 };
    if (row > 0) return null;
    const half = STRIP_PX / 2;
    return { y: line.y + (role === "compute" ? 0 : half), heightPx: half - 1 };
  }

  /** The tracks drawn between two heights. */
  tracksBetween(top, bottom) {
    const visible = [];
    for (const [track, line] of this.lineOfTrack) {
      if (line.y < bottom && line.y + line.heightPx > top) visible.push(track);
    }
    return visible;
  }

  lineAt(y) {
    return this.lines.find((line) => y >= line.y && y < line.y + line.heightPx);
  }

  toggle(key) {
    if (!this.folded.delete(key)) this.folded.add(key);
    this.place();
  }

  /** Fold all ranks, or open them if all are folded. */
  toggleAll() {
    const keys = [...this.ranks.keys()].map(rankKey);
    const isOpen = keys.some((key) => !this.folded.has(key));
    for (const key of keys) isOpen ? this.folded.add(key) : this.folded.delete(key);
    this.place();
  }

  /** Place these ranks at the top, in this order; several are folded, so that their work can be compared. */
  lead(ranks) {
    const known = ranks.filter((rank) => this.ranks.has(rank));
    const others = [...this.ranks].filter(([rank]) => !known.includes(rank));
    this.ranks = new Map([...known.map((rank) => [rank, this.ranks.get(rank)]), ...others]);
    if (known.length > 1) for (const rank of known) this.folded.add(rankKey(rank));
    this.place();
  }

  /** Fold what was folded in another layout. */
  foldAll(keys) {
    this.folded = new Set(keys);
    this.place();
  }

  /** Unfold whatever hides a track. */
  reveal(track) {
    this.folded.delete(rankKey(track.rank));
    this.folded.delete(groupKey(track.rank, track.group));
    this.place();
  }
}

function rankKey(rank) {
  return `rank ${rank}`;
}

function groupKey(rank, group) {
  return `rank ${rank}/${group}`;
}

function entry(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}

/** Findings with the row of each: one row per finding; the last row shows all others. */
function assignRows(findings) {
  const rows = new Map();
  for (const mark of findings) entry(rows, mark.key, () => rows.size);
  return findings.map((mark) => ({ ...mark, row: Math.min(rows.get(mark.key), MAX_FINDING_ROWS - 1) }));
}
