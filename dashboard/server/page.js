// What keyboards and screen readers need and Streamlit lacks: each section of the navigation is a list, the link of the
// page that is shown is the current one, and a table that scrolls can be reached by Tab. And figures get a button that
// downloads them as SVG. An empty page is loaded again, and what draws figures before the first page that has some. Where
// Streamlit or Plotly changes its markup, nothing happens.
(() => {
  if (window.tracekitMarked) return;
  window.tracekitMarked = true;
  const set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  };
  const mark = () => {
    for (const list of document.querySelectorAll("ul[data-testid=stSidebarNavItems]")) {
      set(list, "role", "presentation");
      for (const child of list.children) {
        if (child.tagName === "LI") {
          set(child, "role", "presentation");
          continue;
        }
        const heading = child.querySelector("[data-testid=stNavSectionHeader]");
        set(child, "role", "list");
        if (heading) set(heading, "role", "presentation");
      }
      for (const link of list.querySelectorAll("a")) {
        if (new URL(link.href).pathname === location.pathname) set(link, "aria-current", "page");
        else link.removeAttribute("aria-current");
      }
    }
    for (const table of document.querySelectorAll(".tk-table")) {
      if (table.scrollWidth > table.clientWidth) set(table, "tabindex", "0");
      else table.removeAttribute("tabindex");
    }
    for (const png of document.querySelectorAll(".modebar-btn[data-title^='Download plot']")) addSvgButton(png);
  };
  // Plotly's own button, which makes a PNG, with another format for the time of a click.
  const addSvgButton = (png) => {
    const figure = png.closest(".js-plotly-plot");
    const options = figure?._context?.toImageButtonOptions;
    if (!options || png.parentElement.querySelector(".tk-svg")) return;
    const button = document.createElement("a");
    button.className = "modebar-btn tk-svg";
    button.rel = "tooltip";
    button.dataset.title = "Download as SVG";
    button.textContent = "SVG";
    button.addEventListener("click", () => {
      figure._context.toImageButtonOptions = { ...options, format: "svg" };
      png.click();
      figure._context.toImageButtonOptions = options;
    });
    png.after(button);
  };
  let frame = 0;
  const markSoon = () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(mark);
  };
  // A connection that is lost just as a page begins leaves it empty: Streamlit connects again and waits for a click.
  const EMPTY_MS = 5000;
  let emptySince = null;
  const checkPage = () => {
    const { testScriptState, testConnectionState } = document.querySelector("[data-testid=stApp]")?.dataset ?? {};
    const isIdle = testScriptState === "notRunning" && testConnectionState === "CONNECTED";
    const isEmpty = isIdle && document.querySelector("[data-testid=stMain]")?.innerText.trim() === "";
    emptySince = isEmpty ? emptySince ?? performance.now() : null;
    if (isEmpty && performance.now() - emptySince > EMPTY_MS) location.reload();
    // Plotly takes most of a second to start: of a page without figures, while it is read, not after the next click.
    if (isIdle && !isEmpty && window.tracekitPlotly) {
      import(window.tracekitPlotly).catch(() => {});
      window.tracekitPlotly = "";
    }
  };
  setInterval(checkPage, EMPTY_MS / 5);
  new MutationObserver(markSoon).observe(document.body, { childList: true, subtree: true });
  addEventListener("resize", markSoon);
  mark();
})();
