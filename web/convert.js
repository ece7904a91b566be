// Core's loader nodes replaced by the lazy ones, and back, in the JSON of a canvas: the same as host/convert.py, from the same table.
// Pure: no DOM, no front end.

const SEARCH_NAME = "Node name for S&R"; // texts refer to a node's widgets by it, as in %UNETLoader.unet_name%
const PROVENANCE = ["cnr_id", "aux_id", "ver"]; // which pack a node is from; a front end without the class offers that pack
const STASH = "lazy_h3_stock"; // the property in which a lazy node keeps the provenance of the stock one
const VIRTUAL = ["PrimitiveNode", "Reroute"]; // the front end resolves them before it queues a prompt
const GROUP_NODE = /^workflow[>/](.*)$/s;
const SUBGRAPH = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;

/**
 * A loader, by its id and class, and the name of the subgraph that it is in. `remark`: why left alone, or what to know.
 * @typedef {{node: string, kind: string, place: string, remark: string}} Found
 */

/**
 * A converted copy of a canvas, subgraphs included.
 * @param {object} workflow of version 0.4 or 1
 * @param {"lazy" | "stock"} target
 * @param {object} table the content of loaders.json
 * @returns {{workflow: object, replaced: Found[], left_alone: Found[]}}
 */
export function convertCanvas(workflow, target, table) {
  const done = { workflow: structuredClone(workflow), replaced: [], left_alone: [] };
  const scopes = allScopes(done.workflow);
  const canvas = {
    rules: new Rules(target, table),
    definitions: new Set(scopes.slice(1).map((scope) => scope.id)),
    groupNodes: done.workflow.extra?.groupNodes ?? {},
    text: JSON.stringify(done.workflow),
  };
  for (const scope of scopes) {
    const origins = originsOf(scope);
    const place = scope === done.workflow ? "" : String(scope.name || scope.id);
    for (const node of scope.nodes) convertNode(node, place, origins, canvas, done);
  }
  return done;
}

function convertNode(node, place, origins, canvas, done) {
  const { rules } = canvas;
  const kind = node.type;
  const names = rules.fileWidgets(kind);
  const found = (remark) => ({ node: String(node.id), kind, place, remark });
  const reason = whyLeft(node, canvas) || rules.whyLeft(kind, filesOf(node, names));
  if (reason) {
    done.left_alone.push(found(reason));
  } else if (rules.twins.has(kind)) {
    done.replaced.push(found(rules.remark(names.filter((name) => isComputed(node, name, origins)))));
    node.type = rules.twins.get(kind);
    if (isObject(node.properties)) node.properties = propertiesOf(node.properties, kind, canvas);
  }
}

/** Which class is replaced by which, and why others are not. */
class Rules {
  constructor(target, table) {
    const pairs = Object.entries(table.loaders).map(([stock, { lazy }]) => [stock, lazy]);
    this.isLazy = target === "lazy";
    this.table = table;
    this.reasons = table.reasons;
    this.stockOf = new Map(pairs.map(([stock, lazy]) => [lazy, stock]));
    this.twins = this.isLazy ? new Map(pairs) : this.stockOf;
  }

  /** Names of the widgets that name files: the first ones of a loader, in this order. */
  fileWidgets(kind) {
    return this.table.loaders[this.stockOf.get(kind) ?? kind]?.files ?? [];
  }

  /** Why a node is left alone; nothing for one that is replaced, and for one that is no loader. */
  whyLeft(kind, files = []) {
    if (this.twins.has(kind)) return this.isLazy ? this.whyNotLazy(files) : "";
    const isLoader = kind.toLowerCase().includes("loader");
    if (Object.hasOwn(this.table.loaders, kind)) return this.reasons["already stock"];
    if (kind.startsWith("LazyH3")) return isLoader ? this.reasons[this.isLazy ? "already lazy" : "handle"] : "";
    if (!this.isLazy) return "";
    if (Object.hasOwn(this.table.left_alone, kind)) return this.table.left_alone[kind];
    return isLoader ? this.reasons[kind.toLowerCase().includes("gguf") ? "gguf" : "no counterpart"] : "";
  }

  /** What to know of a loader that is replaced, some of whose files are named by other nodes. */
  remark(computed) {
    return computed.length && this.isLazy ? this.reasons.linked.replace("{input}", computed[0]) : "";
  }

  whyNotLazy(files) {
    const bad = files.find((file) => typeof file === "string" && !this.table.suffixes.some((suffix) => file.endsWith(suffix)));
    return bad === undefined ? "" : this.reasons.file.replace("{file}", () => bad);
  }
}

/** Why a node must stay that is a loader only on the canvas, where slots and definitions are known. */
function whyLeft(node, { rules, definitions, groupNodes }) {
  const kind = node.type;
  const group = GROUP_NODE.exec(kind);
  if (group) {
    const inside = groupNodes[group[1]]?.nodes ?? [];
    return inside.some((each) => rules.twins.has(each.type)) ? rules.reasons["group node"] : "";
  }
  if (SUBGRAPH.test(kind)) return definitions.has(kind) ? "" : rules.reasons["no definition"];
  const isKnown = rules.fileWidgets(kind).length || kind.startsWith("LazyH3") || VIRTUAL.includes(kind) || rules.whyLeft(kind);
  return rules.isLazy && !isKnown && makesModels(node, rules.table) ? rules.reasons["no counterpart"] : "";
}

/** With the other pack's name, and the other class's where no text refers to this one. */
function propertiesOf(properties, kind, { rules, text }) {
  const changed = Object.fromEntries(Object.entries(properties).filter(([name]) => ![...PROVENANCE, STASH].includes(name)));
  if (changed[SEARCH_NAME] === kind && !text.includes(`%${kind}.`)) changed[SEARCH_NAME] = rules.twins.get(kind);
  const { packs } = rules.table;
  if (!rules.isLazy) return { ...changed, ...(properties[STASH] ?? { cnr_id: packs.stock }) };
  const stash = Object.fromEntries(PROVENANCE.filter((name) => name in properties).map((name) => [name, properties[name]]));
  return { ...changed, cnr_id: packs.lazy, [STASH]: stash };
}

/** The canvas, and the definitions of all subgraphs, nested ones included. */
function allScopes(workflow) {
  return [workflow, ...(workflow.definitions?.subgraphs ?? []).flatMap(allScopes)];
}

/** Link id -> the node that it comes from; links from a subgraph's own inputs are left out. */
function originsOf(scope) {
  const nodes = new Map(scope.nodes.map((node) => [String(node.id), node]));
  const links = (scope.links ?? []).filter(Boolean).map((link) => (Array.isArray(link) ? link : [link.id, link.origin_id]));
  return new Map(links.filter(([, origin]) => nodes.has(String(origin))).map(([id, origin]) => [id, nodes.get(String(origin))]));
}

/** Names of the files, without those that come over a link. */
function filesOf(node, names) {
  const linked = (node.inputs ?? []).filter((slot) => slot.link != null).map((slot) => slot.name);
  const values = node.widgets_values ?? [];
  const named = Array.isArray(values) ? Object.fromEntries(names.map((name, place) => [name, values[place]])) : values;
  return names.filter((name) => !linked.includes(name)).map((name) => named[name]);
}

/** Whether the input gets its value from a node that runs. */
function isComputed(node, name, origins) {
  const slots = (node.inputs ?? []).filter((slot) => slot.name === name && slot.link != null);
  const senders = slots.map((slot) => origins.get(slot.link)).filter(Boolean);
  return senders.some((sender) => !VIRTUAL.includes(sender.type) && !sender.mode);
}

/** Whether models come out of the node and none goes in. */
function makesModels(node, table) {
  const hasModel = (slots) => (slots ?? []).some((slot) => table.model_types.includes(slot.type));
  return hasModel(node.outputs) && !hasModel(node.inputs);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
