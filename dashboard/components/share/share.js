// Asks the server for the page as one file, as its address is at the moment of the click, and downloads the answer.

const downloaded = new WeakMap();

/** The bytes from Python: four with the length of the head, the head as JSON, the file. */
function unpacked(data) {
  const length = new DataView(data.buffer, data.byteOffset).getUint32(0, true);
  return { ...JSON.parse(new TextDecoder().decode(data.subarray(4, 4 + length))), content: data.slice(4 + length) };
}

function download({ name, content }) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "text/html" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

export default function ({ data, parentElement, setStateValue }) {
  const button = parentElement.querySelector("button");
  const status = parentElement.querySelector(".status");
  button.onclick = () => {
    status.textContent = "Making the file …";
    setStateValue("request", { query: location.search, number: Date.now() });
  };
  const answer = unpacked(data);
  if (!answer.number || downloaded.get(button) === answer.number) return;
  downloaded.set(button, answer.number);
  status.textContent = answer.status;
  if (answer.name) download(answer);
}
