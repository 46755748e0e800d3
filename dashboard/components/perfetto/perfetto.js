// Perfetto's page takes a trace by postMessage once it has answered PING with PONG.
// https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui

const PLACE = "https://ui.perfetto.dev";
const PING_EVERY_MS = 200;
const GIVE_UP_MS = 60000;

/** The bytes that Python sent: two of the name's length, the name, the trace. */
function unpacked(data) {
  const length = data[0] + 256 * data[1];
  return { name: new TextDecoder().decode(data.subarray(2, 2 + length)), trace: data.slice(2 + length).buffer };
}

/** Open the tab and hand the trace over when it is ready; `say` tells how that goes. */
function handOver({ name, trace }, say) {
  const tab = window.open(PLACE);
  if (!tab) return say("The browser did not allow a new tab: allow pop-ups for this page.");
  say("Waiting for ui.perfetto.dev …");
  const pinging = setInterval(() => tab.postMessage("PING", PLACE), PING_EVERY_MS);
  const stop = () => {
    clearInterval(pinging);
    clearTimeout(waiting);
    window.removeEventListener("message", onMessage);
  };
  const onMessage = (event) => {
    if (event.source !== tab || event.origin !== PLACE || event.data !== "PONG") return;
    stop();
    tab.postMessage({ perfetto: { buffer: trace, title: name, fileName: name, keepApiOpen: true } }, PLACE);
    say("Handed over.");
  };
  const waiting = setTimeout(() => {
    stop();
    say("ui.perfetto.dev did not answer. Download the file and open it there.");
  }, GIVE_UP_MS);
  window.addEventListener("message", onMessage);
}

export default function ({ data, parentElement }) {
  const said = parentElement.querySelector(".said");
  const say = (text) => (said.textContent = text);
  parentElement.querySelector("button").onclick = () => handOver(unpacked(data), say);
}
