"use strict";

const find = (id) => document.getElementById(id);
const BARS = 10; // number of classes shown
let limits = null;
let lastRequest = 0; // answers to earlier requests are ignored

function percent(value) {
  const text = (100 * value).toFixed(1);
  if (value > 0.9995 && value < 1) return "> 99.9 %";
  return value > 0 && text === "0.0" ? "< 0.1 %" : `${text} %`;
}

function fail(text) {
  find("error").textContent = text;
  find("error").hidden = false;
  find("answer").hidden = true;
  find("status").textContent = "";
}

function show(answer, size) {
  const [best] = answer.top;
  const verdict = answer.unknown ? "unknown" : best.label;
  const chance = `with a probability of ${percent(best.probability)}`;
  find("verdict").textContent = verdict;
  find("detail").textContent = answer.unknown ? `most like ${best.label}, ${chance}` : chance;
  find("seen").src = answer.seen;
  find("seen-caption").textContent = size ? `the net’s view, ${size[1]}×${size[0]}` : "the net’s view";
  find("bars").replaceChildren(
    ...answer.top.map(({ label, probability }) => {
      const row = document.createElement("li");
      const [name, share, track, bar] = ["name", "share", "track", "bar"].map((kind) => {
        const part = document.createElement("span");
        part.className = kind;
        return part;
      });
      name.textContent = label;
      share.textContent = percent(probability);
      bar.style.width = `${100 * probability}%`;
      track.append(bar);
      row.append(name, share, track);
      return row;
    }),
  );
  find("answer").hidden = false;
  document.body.classList.add("answered");
  find("status").textContent = `${verdict}, ${percent(best.probability)}`;
}

async function classify(file) {
  const request = ++lastRequest;
  find("error").hidden = true;
  if (limits && file.size > limits.body) {
    fail(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB. The limit is ${limits.body / 1e6} MB: make it smaller.`);
    return;
  }
  document.body.classList.add("busy");
  find("status").textContent = "classifying the picture";
  const picture = find("picture");
  URL.revokeObjectURL(picture.src);
  picture.src = URL.createObjectURL(file);
  picture.alt = file.name ? `your picture, ${file.name}` : "your picture";
  try {
    const response = await fetch(`/predict?top=${BARS}&seen=1`, {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream" }, // the browser's guess from the name may be wrong
      body: file,
    });
    const answer = await response.json();
    if (request !== lastRequest) return;
    if (response.ok) show(answer, about.size);
    else fail(sentence(answer.error));
  } catch {
    if (request === lastRequest) fail("The service does not answer. Is it still running?");
  } finally {
    if (request === lastRequest) document.body.classList.remove("busy");
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + ".";
}

function classifyFirst(files) {
  const file = [...files].find((one) => one.type.startsWith("image/")) ?? files[0];
  if (file) classify(file);
}

const about = {};

async function introduce() {
  for (const place of document.querySelectorAll(".here")) place.textContent = location.origin;
  const response = await fetch("/health");
  const health = await response.json();
  if (!response.ok) return fail(sentence(health.error));
  about.size = health.image_size;
  limits = health.limits;
  const names = health.classes.slice(0, 10).join(", ") + (health.classes.length > 10 ? ", …" : "");
  find("about").textContent = `${health.net} predicts ${health.classes.length} classes: ${names}.`;
  find("limits").textContent =
    `Limits of a request: ${limits.body / 1e6} MB, ${limits.images} images of ${(limits.pixels / 1e6).toFixed(0)} million pixels, ` +
    `and ${limits.decode_seconds} s of CPU time to decode.`;
}

find("file").addEventListener("change", (event) => {
  classifyFirst(event.target.files);
  event.target.value = ""; // allows the same file to be chosen again
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("over");
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("over");
});
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  if (event.dataTransfer.files.length) classifyFirst(event.dataTransfer.files);
  else fail("This is not a file. Save the picture first, then drop it here.");
});
addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) classifyFirst(event.clipboardData.files);
  else fail("There is no picture in the clipboard. Copy a picture, then paste it.");
});
introduce().catch(() => fail("The service does not answer. Is it still running?"));
