// The theme makes a prefix of every word of a query, so that "in" and "n" match all pages, and "goal" is worth no more
// than "goalkeeper". Here short words stand for themselves, words without a meaning are left out, and a whole word
// counts more than a prefix. The prefix is without the word's ending, so that "priority" finds "priorities".
const meaningless = /^(a|an|and|are|can|do|does|for|from|have|how|i|in|is|it|its|my|of|on|or|than|the|to|use|what|when|with)$/i;

const ending = /(?<=.{4})(ies|ing|es|ed|s|y|e)$/;

function rewritten(query) {
  if (/["+^~]/.test(query)) return query;
  // The index has no word "her", and "per" begins other words.
  query = query.replace(/\bher\b/gi, "hindsight").replace(/^per$/i, "prioritized");
  const words = query.split(/[\s\-_.]+/).filter((word) => word && !meaningless.test(word));
  return words.map((word) => (word.length < 3 ? `${word}^4` : `${word.replace(ending, "")} ${word}^8`)).join(" ") || query;
}

const ask = window.Worker.prototype.postMessage;
window.Worker.prototype.postMessage = function (message, ...rest) {
  const query = typeof message?.data === "string" && message.type === 2;
  return ask.call(this, query ? { ...message, data: rewritten(message.data) } : message, ...rest);
};
