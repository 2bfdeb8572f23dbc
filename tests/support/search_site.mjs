// Asks the search of the built site: its own worker, behind the rewriting of docs/javascripts/search.js.
// node search_site.mjs SITE < questions, one a line. Prints, as JSON, for every question the results as the site shows
// them: for each page its own address and those of the sections that stand below it unfolded.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const site = process.argv[2];
const scripts = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(scripts).find((name) => /^search\..*\.js$/.test(name));
const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));

let heard;
let answered;
const inside = { console, addEventListener: (_, handler) => (heard = handler), postMessage: (answer) => answered(answer) };
inside.self = inside;
vm.runInNewContext(fs.readFileSync(path.join(scripts, worker), "utf8"), inside);

// The page's side of a worker, which search.js patches.
class Worker {
  postMessage(message) {
    heard({ data: message });
  }
}
vm.runInNewContext(fs.readFileSync(path.join(site, "javascripts/search.js"), "utf8"), { window: { Worker } });
const ask = (message) =>
  new Promise((resolve) => {
    answered = resolve;
    new Worker().postMessage(message);
  });

await ask({ type: 0, data: { config, docs, options: { suggest: true } } });
const found = {};
for (const question of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  const { data } = await ask({ type: 2, data: question });
  found[question] = data.items.map((results) => {
    const article = results.find(({ location }) => !location.includes("#"));
    const others = results.filter((result) => result !== article);
    const folded = others.findIndex(({ score }) => score < results[0].score);
    return [article, ...others.slice(0, folded === -1 ? others.length : folded)].map(({ location }) => location);
  });
}
console.log(JSON.stringify(found));
