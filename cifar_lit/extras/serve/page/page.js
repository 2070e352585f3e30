"use strict";

const find = (id) => document.getElementById(id);
let net = {}; // what the service says about itself
let lastRequest = 0; // answers to earlier requests are ignored

function percent(value) {
  if (value > 0.9995 && value < 1) return "> 99.9 %";
  return value > 0 && value < 0.0005 ? "< 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

function fail(text) {
  find("error").textContent = text;
  find("error").hidden = false;
  find("answer").hidden = true;
}

function part(kind, text = "") {
  return Object.assign(document.createElement("span"), { className: kind, textContent: text });
}

function bar({ label, probability }) {
  const row = document.createElement("li"), filled = part("bar"), track = part("track");
  filled.style.width = `${100 * probability}%`;
  track.append(filled);
  row.append(part("name", label), part("share", percent(probability)), track);
  return row;
}

function show(answer) {
  const several = net.coverage === null && answer.prediction_set; // labels above their thresholds
  const chance = several
    ? "labels whose probability reaches their threshold"
    : `with a probability of ${percent(answer.probability)}`;
  const label = several ? answer.prediction_set.join(", ") || "none of the labels" : answer.label;
  find("verdict").textContent = answer.unknown ? "unknown" : label;
  find("detail").textContent = answer.unknown
    ? `This picture is unlike the known classes. If it is one of them, then ${answer.label}, ${chance}.`
    : chance;
  find("set").textContent = answer.prediction_set && !several
    ? `Prediction set: ${answer.prediction_set.join(", ")}. ` +
      `${percent(net.coverage)} of such sets contain the true class, for pictures like those of the training.`
    : "";
  find("caveat").textContent = net.caveat;
  find("status").textContent = `${find("verdict").textContent}, ${find("detail").textContent}`;
  find("seen").src = answer.seen;
  find("bars").replaceChildren(...answer.top.map(bar));
  find("error").hidden = true;
  find("answer").hidden = false;
  document.body.classList.add("answered");
}

async function ask(path, settings) {
  const response = await fetch(path, settings).catch(() => {
    throw new Error("The service does not answer. Is it still running?");
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function classify(files) {
  if (!files.length) return fail("There is no picture. Save it first, then choose, drop or paste the file.");
  const request = ++lastRequest, file = files[0];
  find("status").textContent = "classifying the picture";
  URL.revokeObjectURL(find("picture").src);
  find("picture").src = URL.createObjectURL(file);
  document.body.classList.add("busy");
  try {
    const answer = await ask("/predict?top=10&seen=1", { method: "POST", body: file });
    if (request === lastRequest) show(answer);
  } catch (error) {
    if (request === lastRequest) fail(error.message);
  }
  if (request === lastRequest) document.body.classList.remove("busy");
}

find("file").addEventListener("change", ({ target }) => {
  classify([...target.files]);
  target.value = ""; // allows the same file to be chosen again
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  classify(event.dataTransfer.files);
});
addEventListener("paste", (event) => classify(event.clipboardData.files));

find("here").textContent = location.origin;
ask("/health").then((health) => {
  net = health;
  const names = health.classes.slice(0, 10).join(", ") + (health.classes.length > 10 ? ", …" : "");
  find("about").textContent = `${health.net} predicts ${health.classes.length} classes: ${names}.`;
}).catch((error) => fail(error.message));
