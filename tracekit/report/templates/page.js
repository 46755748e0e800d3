// Figures take the page's text colour, also on a dark page, and black when printed.
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = JSON.parse(document.getElementById("config").textContent);
const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
const plots = [];

/** Run Plotly's script, which the page holds compressed; the page's policy allows this very text. */
async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await inflated(document.getElementById("plotly").textContent));
  document.head.append(script);
}

/** The camera button makes a PNG; the one next to it makes an SVG. */
function withSvgButton(config, name) {
  const image = {...config.toImageButtonOptions, filename: `${document.title}-${name}`.replace(/[^\w.-]+/g, "-")};
  const svg = {
    name: "toSvg",
    title: "Download as SVG",
    icon: Plotly.Icons.disk,
    click: (element) => Plotly.downloadImage(element, {...image, format: "svg"}),
  };
  return {...config, toImageButtonOptions: image, modeBarButtons: [...config.modeBarButtons.slice(0, -1), [...config.modeBarButtons.at(-1), svg]]};
}

async function draw() {
  await loadPlotly();
  for (const [name, figure] of Object.entries(figures)) {
    const element = document.getElementById("figure-" + name);
    figure.layout.font = {...figure.layout.font, color: ink()};
    plots.push(element);
    Plotly.newPlot(element, figure.data, figure.layout, withSvgButton(config, name));
  }
}

const repaint = (colour, width) => plots.map(
  (element) => Plotly.relayout(element, {"font.color": colour, width, autosize: !width}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint(ink(), null));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  repaint("#000000", 680);
});
addEventListener("afterprint", () => repaint(ink(), null));
if (Object.keys(figures).length) draw();
