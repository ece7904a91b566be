// Commands on the canvas: core's loaders become lazy, and stock again.

// @ts-ignore  (a module of the front end)
import { app } from "../../scripts/app.js";
import { convertCanvas } from "./convert.js";

const MAX_LISTED = 5;
const COMMANDS = [
  { id: "LazyH3.MakeLazy", target: "lazy", label: "Lazy H3: make loaders lazy" },
  { id: "LazyH3.MakeStock", target: "stock", label: "Lazy H3: make loaders stock again" },
];

app.registerExtension({
  name: "LazyH3.Convert",
  commands: COMMANDS.map(({ id, label, target }) => ({ id, label, icon: "pi pi-sync", function: () => convertOpenCanvas(target) })),
  menuCommands: [{ path: ["Extensions", "Lazy H3"], commands: COMMANDS.map(({ id }) => id) }],
  getCanvasMenuItems: () => [
    null,
    ...COMMANDS.map(({ label, target }) => ({ content: label, callback: () => convertOpenCanvas(target) })),
  ],
});

/** Replace the loaders of the whole workflow, whichever of its subgraphs is in view. One step to undo. */
async function convertOpenCanvas(target) {
  const answer = await fetch(new URL("./loaders.json", import.meta.url));
  const done = convertCanvas(rootGraph().serialize(), target, await answer.json());
  if (done.replaced.length) replaceGraph(done.workflow);
  tell(done, target);
}

/** Put the workflow on the canvas as undo does, without a new tab, and stay where the user is. */
function replaceGraph(workflow) {
  const { canvas } = app;
  const view = { scale: canvas.ds.scale, offset: [...canvas.ds.offset] };
  const inView = canvas.graph === rootGraph() ? null : canvas.graph.id;
  canvas.emitBeforeChange();
  try {
    if (inView !== null) canvas.setGraph(rootGraph());
    rootGraph().configure(workflow);
    const subgraph = rootGraph().subgraphs?.get(inView);
    if (subgraph) canvas.setGraph(subgraph);
  } finally {
    canvas.emitAfterChange();
  }
  canvas.ds.scale = view.scale;
  canvas.ds.offset = view.offset;
  canvas.setDirty(true, true);
}

function rootGraph() {
  return app.rootGraph ?? app.graph;
}

function tell({ replaced, left_alone: left }, target) {
  const title = `Loaders made ${target}: ${replaced.length}, left alone: ${left.length}`;
  const lines = [...replaced.filter(({ remark }) => remark), ...left].map(({ node, kind, remark }) => `${node} ${kind}: ${remark}.`);
  const more = lines.length > MAX_LISTED ? [`And ${lines.length - MAX_LISTED} more.`] : [];
  const detail = [...lines.slice(0, MAX_LISTED), ...more].join("\n");
  const { toast } = app.extensionManager;
  if (typeof toast.info === "function") toast.info(title, { description: detail });
  else toast.add({ severity: "info", summary: title, detail, life: 10000 });
}
