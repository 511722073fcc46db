// Elements. Text goes in as text nodes only, so nothing recorded is ever parsed as HTML.

export type Child = Node | string | number | null | undefined | false;

type Listeners = { [K in keyof HTMLElementEventMap]?: (event: HTMLElementEventMap[K]) => void };
type Attributes = Record<string, string | number | boolean | null | undefined>;

const NAMESPACE = "http://www.w3.org/2000/svg";

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  children: Child[] = [],
  listeners: Listeners = {},
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...nodes(children));
  for (const [name, listener] of Object.entries(listeners)) element.addEventListener(name, listener as EventListener);
  return element;
}

export function svg<K extends keyof SVGElementTagNameMap>(tag: K, attributes: Attributes = {}, children: Child[] = []): SVGElementTagNameMap[K] {
  const element = document.createElementNS(NAMESPACE, tag);
  set(element, attributes);
  element.append(...nodes(children));
  return element;
}

export function fill(element: Element, children: Child[]): void {
  element.replaceChildren(...nodes(children));
}

/** Set attributes; false, null and undefined remove them, true is the empty text. */
export function set(element: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

function nodes(children: Child[]): (Node | string)[] {
  return children.filter((child) => child !== null && child !== undefined && child !== false).map((child) => (typeof child === "number" ? String(child) : child));
}

/** Icons, drawn by hand on a grid of 16; stroked unless filled. */
const ICONS = {
  play: ["M4.5 2.8 13 8l-8.5 5.2z", true],
  pause: ["M4 3h2.8v10H4zM9.2 3H12v10H9.2z", true],
  back: ["M11 3.5 5.5 8l5.5 4.5M4 3.5v9", false],
  forward: ["M5 3.5 10.5 8 5 12.5M12 3.5v9", false],
  first: ["M12.5 3.5 7.5 8l5 4.5M7.5 3.5 2.5 8l5 4.5", false],
  last: ["M3.5 3.5 8.5 8l-5 4.5M8.5 3.5l5 4.5-5 4.5", false],
  sun: ["M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6zM8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3.1 3.1l1.1 1.1M11.8 11.8l1.1 1.1M12.9 3.1l-1.1 1.1M4.2 11.8l-1.1 1.1", false],
  moon: ["M13.2 9.6A5.6 5.6 0 0 1 6.4 2.8a5.6 5.6 0 1 0 6.8 6.8z", false],
  up: ["M3.5 10 8 5.5l4.5 4.5", false],
  down: ["M3.5 6 8 10.5 12.5 6", false],
  pin: ["M6 2.5h4l-.6 4.5 2.6 2.2H4l2.6-2.2zM8 9.2v4.3", false],
  close: ["M4 4l8 8M12 4l-8 8", false],
  copy: ["M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z", false],
  left: ["M10 3.5 5.5 8l4.5 4.5", false],
  right: ["M6 3.5 10.5 8 6 12.5", false],
  rows: ["M2.5 4h11M2.5 8h11M2.5 12h11", false],
  grid: ["M2.5 2.5h4.5V7H2.5zM9 2.5h4.5V7H9zM2.5 9h4.5v4.5H2.5zM9 9h4.5v4.5H9z", false],
  branch: ["M1.5 8h4c3.5 0 3.5-4.5 9-4.5M5.5 8h9M5.5 8c3.5 0 3.5 4.5 9 4.5", false],
  compare: ["M2.5 3h4v10h-4zM9.5 3h4v10h-4z", false],
} as const;

export function icon(name: keyof typeof ICONS): SVGElement {
  const [path, filled] = ICONS[name];
  return svg("svg", { viewBox: "0 0 16 16", class: filled ? "icon filled" : "icon", "aria-hidden": "true", focusable: "false" }, [svg("path", { d: path })]);
}
