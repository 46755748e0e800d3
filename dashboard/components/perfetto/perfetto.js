// Perfetto's page accepts a trace by postMessage once it has answered PING with PONG.
// https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui

const PERFETTO_URL = "https://ui.perfetto.dev";
const PING_EVERY_MS = 200;
const TIMEOUT_MS = 60000;

/** The bytes from Python: two with the length of the name, the name, the trace. */
function unpacked(data) {
  const length = data[0] + 256 * data[1];
  return { name: new TextDecoder().decode(data.subarray(2, 2 + length)), trace: data.slice(2 + length).buffer };
}

/** Open the tab and send the trace when it is ready; `showStatus` shows the progress. */
function openTrace({ name, trace }, showStatus) {
  const tab = window.open(PERFETTO_URL);
  if (!tab) return showStatus("The browser blocked the new tab. Allow pop-ups for this page.");
  showStatus("Waiting for ui.perfetto.dev …");
  const pinging = setInterval(() => tab.postMessage("PING", PERFETTO_URL), PING_EVERY_MS);
  const stop = () => {
    clearInterval(pinging);
    clearTimeout(timer);
    window.removeEventListener("message", onMessage);
  };
  const onMessage = (event) => {
    if (event.source !== tab || event.origin !== PERFETTO_URL || event.data !== "PONG") return;
    stop();
    tab.postMessage({ perfetto: { buffer: trace, title: name, fileName: name, keepApiOpen: true } }, PERFETTO_URL);
    showStatus("The trace was sent to the tab.");
  };
  const timer = setTimeout(() => {
    stop();
    showStatus("ui.perfetto.dev did not answer. Download the file and open it there.");
  }, TIMEOUT_MS);
  window.addEventListener("message", onMessage);
}

export default function ({ data, parentElement }) {
  const status = parentElement.querySelector(".status");
  const showStatus = (text) => (status.textContent = text);
  parentElement.querySelector("button").onclick = () => openTrace(unpacked(data), showStatus);
}
