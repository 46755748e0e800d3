// What stands where from top to bottom: ranks, their groups and tracks, and which of them are folded.

const ROW_PX = 17;
const TRACK_GAP_PX = 5;
const RANK_PX = 22;
const UNITS_PX = 15;
const GROUP_PX = 18;
const STRIP_PX = 18;
const MAX_OPEN_HOSTS = 2;

class Layout {
  /** `tracks` in the order in which they are to stand; `unitRanks`: the ranks that have bands of units. */
  constructor(tracks, unitRanks) {
    this.ranks = new Map();
    for (const track of tracks) {
      const groups = entry(this.ranks, track.rank, () => new Map());
      entry(groups, track.group, () => []).push(track);
    }
    this.unitRanks = new Set(unitRanks);
    this.folded = new Set(this.foldedAtFirst());
    this.place();
  }

  /** Of many ranks the host's threads are folded, so that the devices stand under each other. */
  foldedAtFirst() {
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
      this.add({ what: "rank", key: rankKey(rank), rank, label: rankKey(rank) }, RANK_PX);
      if (this.folded.has(rankKey(rank))) this.addStrip(rank, groups);
      else this.addGroups(rank, groups);
      part.bottom = this.heightPx;
    }
  }

  addGroups(rank, groups) {
    if (this.unitRanks.has(rank)) this.add({ what: "units", rank, label: "units" }, UNITS_PX);
    for (const [group, tracks] of groups) {
      const key = groupKey(rank, group);
      this.add({ what: "group", key, rank, label: group }, GROUP_PX);
      if (this.folded.has(key)) continue;
      for (const track of tracks) {
        const line = this.add({ what: "track", rank, track, label: track.label }, track.rows * ROW_PX + TRACK_GAP_PX);
        this.lineOfTrack.set(track.track, line);
      }
    }
  }

  /** A folded rank still shows its work: compute above, all else of its devices below. */
  addStrip(rank, groups) {
    const work = [...groups.values()].flat().filter((track) => track.role !== "host");
    if (!work.length) return;
    const line = this.add({ what: "strip", rank, label: "" }, STRIP_PX + TRACK_GAP_PX);
    for (const track of work) this.lineOfTrack.set(track.track, line);
  }

  add(line, heightPx) {
    const placed = { ...line, y: this.heightPx, heightPx };
    this.lines.push(placed);
    this.heightPx += heightPx;
    return placed;
  }

  /** Top and height in px of one row of a track; null where it is folded away. */
  placeOf(track, row, role) {
    const line = this.lineOfTrack.get(track);
    if (!line) return null;
    // Rows too deep to be given a place would stand on the tracks below.
    if (row >= line.track?.rows) return null;
    if (line.what === "track") return { y: line.y + row * ROW_PX, heightPx: ROW_PX - 1 };
    if (row > 0) return null;
    const half = STRIP_PX / 2;
    return { y: line.y + (role === "compute" ? 0 : half), heightPx: half - 1 };
  }

  /** The tracks that are drawn between two heights. */
  tracksBetween(top, bottom) {
    const seen = [];
    for (const [track, line] of this.lineOfTrack) {
      if (line.y < bottom && line.y + line.heightPx > top) seen.push(track);
    }
    return seen;
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

/** Findings with the row each is drawn in: a row for each finding, those beyond the last row together in it. */
function stacked(findings) {
  const rows = new Map();
  for (const mark of findings) entry(rows, mark.key, () => rows.size);
  return findings.map((mark) => ({ ...mark, row: Math.min(rows.get(mark.key), MAX_FINDING_ROWS - 1) }));
}
