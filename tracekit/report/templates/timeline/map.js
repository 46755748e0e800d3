// The overview above the plot: the whole run with its busy time, and the part in view as a window to drag.

const MAP_PX = 34;
const MIN_WINDOW_PX = 6;

class Minimap {
  constructor(timeline) {
    this.timeline = timeline;
    this.canvas = timeline.root.querySelector("canvas.map");
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", () => (this.grip = null));
    this.canvas.addEventListener("pointercancel", () => (this.grip = null));
  }

  /** The moment at a point, and the view's edges in px. */
  nsAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return clamp((event.clientX - box.left - GUTTER_PX) / this.plotPx, 0, 1) * this.timeline.spanNs;
  }

  begin(event) {
    if (event.button !== 0 || !this.timeline.view) return;
    this.canvas.setPointerCapture(event.pointerId);
    const at = this.nsAt(event);
    const { view } = this.timeline;
    // Outside of the window its middle goes to the pointer.
    this.grip = at >= view.from && at <= view.to ? at - (view.from + view.to) / 2 : 0;
    this.move(event);
  }

  move(event) {
    if (this.grip === null || this.grip === undefined) return;
    const { view, spanNs } = this.timeline;
    const middle = this.nsAt(event) - this.grip;
    const half = (view.to - view.from) / 2;
    this.timeline.view = withinRun({ from: middle - half, to: middle + half }, spanNs);
    this.timeline.changed();
  }

  get plotPx() {
    return Math.max(this.timeline.plotPx(), 1);
  }

  paint() {
    const { timeline } = this;
    const { overview, dpr, widthPx, view, spanNs, inks } = timeline;
    if (!overview) return;
    const [width, height] = [Math.round(widthPx * dpr), Math.round(MAP_PX * dpr)];
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, widthPx, MAP_PX);
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    ctx.fillStyle = inks.text;
    ctx.fillText("whole run", 8, MAP_PX / 2, GUTTER_PX - 12);
    this.paintBars(ctx, overview);
    const [left, right] = [view.from, view.to].map((ns) => GUTTER_PX + (ns / spanNs) * this.plotPx);
    const shownPx = Math.max(right - left, MIN_WINDOW_PX);
    ctx.fillStyle = inks.range;
    ctx.fillRect(left, 0, shownPx, MAP_PX);
    ctx.strokeStyle = inks.text;
    ctx.lineWidth = 1;
    ctx.strokeRect(left + 0.5, 0.5, Math.max(shownPx - 1, 1), MAP_PX - 1);
    this.describe();
  }

  /** Compute above, communication below, each as high as the share of time in which the ranks are busy with it. */
  paintBars(ctx, { bars }) {
    const half = MAP_PX / 2 - 2;
    for (const [row, { colour, shares }] of bars.entries()) {
      ctx.fillStyle = colour;
      const step = this.plotPx / shares.length;
      shares.forEach((share, at) => {
        const heightPx = (share / 255) * half;
        ctx.fillRect(GUTTER_PX + at * step, 1 + (row + 1) * (half + 1) - heightPx, Math.max(step, 0.6), heightPx);
      });
    }
  }

  describe() {
    const { view, spanNs } = this.timeline;
    const now = Math.round((100 * (view.from + view.to)) / 2 / spanNs);
    this.canvas.setAttribute("aria-valuenow", now);
    this.canvas.setAttribute("aria-valuetext", `${durationText(view.to - view.from)} from ${this.timeline.moment(Math.round(view.from))}`);
  }
}
