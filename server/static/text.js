// Elements, and the text of a model as elements: blocks of code, and all else as it is. Text is only ever
// set as text, never as markup.

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function split(text) {
  const parts = [];
  let code = false;
  let lines = [];
  const end = () => {
    const joined = lines.join("\n");
    if (code || joined.trim()) parts.push({ code, text: code ? joined : joined.trim() });
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (/^\s*```/.test(line)) {
      end();
      code = !code;
    } else {
      lines.push(line);
    }
  }
  end();
  return parts;
}

// Called over and over while an answer grows; touches only what changed.
export function renderText(container, text) {
  const parts = split(text);
  parts.forEach((part, index) => {
    const tag = part.code ? "PRE" : "P";
    let node = container.children[index];
    if (node?.tagName !== tag) {
      const fresh = element(tag);
      if (part.code) fresh.tabIndex = 0; // it may need scrolling
      if (node) node.replaceWith(fresh);
      else container.append(fresh);
      node = fresh;
    }
    if (node.textContent !== part.text) node.textContent = part.text;
  });
  while (container.children.length > parts.length) container.lastElementChild.remove();
}
