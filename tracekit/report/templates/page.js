// Figures take the page's text colour, also on a dark page, and black when printed.
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = JSON.parse(document.getElementById("config").textContent);
const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
const plots = [];
for (const [name, figure] of Object.entries(figures)) {
  const element = document.getElementById("figure-" + name);
  figure.layout.font = {...figure.layout.font, color: ink()};
  plots.push(element);
  Plotly.newPlot(element, figure.data, figure.layout, config);
}
const repaint = (colour, width) => plots.map(
  (element) => Plotly.relayout(element, {"font.color": colour, width, autosize: !width}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint(ink(), null));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  repaint("#000000", 680);
});
addEventListener("afterprint", () => repaint(ink(), null));
