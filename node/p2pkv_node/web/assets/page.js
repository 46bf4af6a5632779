// Polls /status.json and shows it. Whatever peers and publishers wrote goes in by textContent and is never parsed as HTML.

import { Chart } from "/chart.js";

const POLL_MS = 2000;
const PATIENCE_MS = 10000;
const ROOM = 150; // samples that a chart holds: five minutes

const find = (id) => document.getElementById(id);
const samples = [];

// --- how values are shown ----------------------------------------------------------------------------------------------

function bytes(count) {
  if (count < 1024) return `${Math.round(count)} B`;
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
}
const rate = (count) => `${bytes(count)}/s`;
const number = (count) => Math.round(count).toLocaleString("en");
const share = (part) => `${(100 * part).toFixed(1)} %`;
const short = (id) => (id.length > 20 ? `${id.slice(0, 8)}…${id.slice(-8)}` : id);

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

// --- tables ------------------------------------------------------------------------------------------------------------

function cell(row, text, className = "", title = "") {
  const td = row.insertCell();
  td.textContent = text;
  if (className) td.className = className;
  if (title) td.title = title;
  return td;
}

function fill(id, items, empty, columns, add) {
  const body = document.createElement("tbody");
  for (const item of items) add(body.insertRow(), item);
  if (!items.length) cell(body.insertRow(), empty, "empty").colSpan = columns;
  find(id).tBodies[0].replaceWith(body);
}

function showTransfers(status) {
  fill("transfers", status.transfers, "none", 5, (row, transfer) => {
    const name = transfer.model_name ?? (transfer.prompt_tokens === null ? "" : `a prompt of ${number(transfer.prompt_tokens)} tokens`);
    const what = transfer.manifest === null ? name : `${name} ${short(transfer.manifest)}`;
    cell(row, what, "", transfer.manifest ?? "");
    cell(row, [transfer.state ?? "starting", transfer.detail].filter(Boolean).join(": "));
    const done = cell(row, "");
    const bar = document.createElement("progress");
    bar.max = transfer.total_bytes || 1;
    bar.value = transfer.done_bytes;
    done.append(bar, `${bytes(transfer.done_bytes)} of ${bytes(transfer.total_bytes)}`);
    const busy = transfer.peers.filter((peer) => peer.bytes || peer.outstanding);
    const from = busy.map((peer) => `${short(peer.peer)}: ${bytes(peer.bytes)}, ${rate(peer.rate)}${peer.snubbed ? ", silent" : ""}`);
    cell(row, from.join("; "));
    cell(row, rate(busy.filter((peer) => peer.outstanding).reduce((sum, peer) => sum + peer.rate, 0)), "number");
  });
}

function showArtifacts(status) {
  const now = status.started + status.uptime_s;
  fill("artifacts", status.artifacts, "none", 6, (row, artifact) => {
    cell(row, artifact.model_name);
    cell(row, short(artifact.manifest_cid), "id", artifact.manifest_cid);
    cell(row, number(artifact.token_count), "number");
    cell(row, `${number(artifact.held_segments)} of ${number(artifact.segment_count)}`, "number");
    cell(row, artifact.pins.length ? artifact.pins.join(", ") : "–");
    cell(row, `${duration(Math.max(0, now - artifact.last_used))} ago`);
  });
}

function standing(peer) {
  if (peer.banned) return "banned";
  if (peer.snubbed) return "silent";
  return peer.connected ? "connected" : "known";
}

function showPeers(status) {
  fill("peers", status.peers, "nobody yet", 6, (row, peer) => {
    cell(row, short(peer.peer), "id", peer.peer);
    cell(row, standing(peer), peer.banned || peer.snubbed ? "bad" : "");
    cell(row, peer.dht ? "yes" : "no");
    cell(row, peer.receiving_rate ? rate(peer.receiving_rate) : "–", "number");
    cell(row, number(peer.wanted_blocks), "number");
    cell(row, peer.outstanding_bytes ? bytes(peer.outstanding_bytes) : "–", "number");
  });
}

// --- tiles and charts --------------------------------------------------------------------------------------------------

function tile(label, value, note, alarm = false) {
  const box = document.createElement("div");
  if (alarm) box.className = "alarm";
  for (const [name, text, className] of [["dt", label, ""], ["dd", value, "value"], ["dd", note, "note"]]) {
    const element = document.createElement(name);
    element.textContent = text;
    element.className = className;
    box.append(element);
  }
  return box;
}

function showTiles(status) {
  const { store, served, announcing, outcomes } = status;
  const ended = outcomes.complete + outcomes.partial + outcomes.miss;
  const failures = status.blocks_refused + store.damaged_blocks;
  find("tiles").replaceChildren(
    tile("Stored", bytes(store.bytes), `${number(store.blocks)} blocks, ${bytes(status.disk_free_bytes)} free`),
    tile("Artifacts", number(store.artifacts), `${number(store.complete_artifacts)} held whole`),
    tile("Hit ratio", status.prompt_tokens ? share(status.hit_tokens / status.prompt_tokens) : "–",
      `${number(status.hit_tokens)} of ${number(status.prompt_tokens)} prompt tokens`),
    tile("Fetches", number(ended), `${outcomes.complete} complete, ${outcomes.partial} partial, ${outcomes.miss} misses, ${outcomes.failed} failed`),
    tile("Received", bytes(status.lane_bytes + status.stream_bytes), `${bytes(status.stream_bytes)} of it over streams`),
    tile("Sent", bytes(served.bytes), `${number(served.channels)} channels, ${number(served.refused)} refused`),
    tile("Verification failures", number(failures), `${status.blocks_refused} of peers, ${store.damaged_blocks} on our disk`, failures > 0),
    tile("Peers", number(status.connected_peers), `${number(status.dht_peers)} in the DHT, ${status.banned_peers} banned`),
    tile("Announced", `${number(announcing.announced)} of ${number(announcing.keys)}`,
      announcing.late_s > 0 ? `the latest is ${duration(announcing.late_s)} late` : "none is late", status.late),
  );
}

const charts = [
  new Chart(find("charts"), "Blocks", { received: (s) => s.receiving, sent: (s) => s.sending }, rate),
  new Chart(find("charts"), "Peers", { connected: (s) => s.connected, "in the DHT": (s) => s.dht }, number),
  new Chart(find("charts"), "Hit ratio of prompts", { hits: (s) => s.hits }, share, { most: 1 }),
  new Chart(find("charts"), "Latest announcement", { late: (s) => s.late }, duration, { most: 60 }),
];

function note(status) {
  const last = samples.at(-1);
  if (last !== undefined && status.uptime_s < last.at) samples.length = 0; // the node was started again
  const before = samples.at(-1);
  const received = status.lane_bytes + status.stream_bytes;
  const per = (now, then) => (before === undefined ? null : Math.max(0, now - then) / Math.max(0.1, status.uptime_s - before.at));
  samples.push({
    at: status.uptime_s,
    received,
    sent: status.served.bytes,
    receiving: per(received, before?.received),
    sending: per(status.served.bytes, before?.sent),
    connected: status.connected_peers,
    dht: status.dht_peers,
    hits: status.prompt_tokens ? status.hit_tokens / status.prompt_tokens : null,
    late: status.announcing.late_s,
  });
  if (samples.length > ROOM) samples.shift();
}

// --- polling -----------------------------------------------------------------------------------------------------------

function say(state, text) {
  find("state").dataset.state = state;
  find("state").textContent = text;
}

function show(status) {
  say(status.unready === null ? "ready" : "bad", status.unready === null ? `ready for ${duration(status.uptime_s)}` : status.unready);
  find("identity").textContent = `${status.version} · ${status.addresses.join(" ")}`;
  note(status);
  showTiles(status);
  for (const chart of charts) chart.show(samples, ROOM);
  showTransfers(status);
  showArtifacts(status);
  showPeers(status);
}

async function poll() {
  try {
    const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    const body = await answer.json();
    if (answer.ok) show(body);
    else say("bad", `${body.error.message}. ${body.error.advice}`);
  } catch {
    say("bad", "the node does not answer");
  }
  setTimeout(poll, POLL_MS);
}

poll();
