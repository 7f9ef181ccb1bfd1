// Two helps for readers with scripts: a search over headings and words, and the place in the
// contents. Nothing is loaded, and without this file every page is complete. INDEX, in front of
// this line in the built file, is a list of [what, where, on which page, what it says].
"use strict";
(() => {
    const plain = text => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
    const words = text => plain(text).split(/[^\p{L}\p{N}]+/u).filter(Boolean);
    const entries = INDEX.map(([what, where, page, says]) => ({
        what, where, page, says, own: words(what), other: words(says), around: words(page),
    }));

    // How well an entry fits: every word asked for has to begin one of its words, and not all of
    // them may be words of its page's title alone.
    function fit(entry, asked) {
        let sum = 0;
        for (const word of asked) {
            if (entry.own.includes(word)) sum += 8;
            else if (entry.own.some(own => own.startsWith(word))) sum += 5;
            else if (entry.other.includes(word)) sum += 2;
            else if (entry.other.some(other => other.startsWith(word))) sum += 1;
            else if (!entry.around.some(other => other.startsWith(word))) return 0;
        }
        return sum && sum + 1 / (1 + entry.own.length); // of two, the shorter one
    }

    function find(text) {
        const asked = words(text);
        return entries.map(entry => [fit(entry, asked), entry]).filter(([sum]) => sum > 0)
            .sort((a, b) => b[0] - a[0]).slice(0, 12).map(([, entry]) => entry);
    }

    function make(name, attributes, text = "") {
        const element = document.createElement(name);
        for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
        element.textContent = text;
        return element;
    }

    const field = make("input", {
        type: "search", role: "combobox", placeholder: "Search", "aria-label": "Search the course",
        "aria-autocomplete": "list", "aria-controls": "found", autocomplete: "off",
    });
    const list = make("ul", {id: "found", role: "listbox", "aria-label": "Results"});
    const said = make("p", {class: "said", role: "status"});
    let found = [], at = -1;

    function choose(next) {
        at = next;
        [...list.children].forEach((item, i) => item.setAttribute("aria-selected", i === at));
        list.children[at]?.scrollIntoView({block: "nearest"});
        if (at < 0) field.removeAttribute("aria-activedescendant");
        else field.setAttribute("aria-activedescendant", `found-${at}`);
    }

    function open(yes) {
        list.hidden = !yes;
        field.setAttribute("aria-expanded", yes);
    }

    function go(entry) {
        open(false);
        location.href = entry.where;
    }

    function show() {
        found = find(field.value);
        list.replaceChildren(...found.map((entry, i) => {
            const item = make("li", {role: "option", id: `found-${i}`}, entry.what);
            item.append(make("small", {}, entry.says || entry.page));
            item.addEventListener("click", () => go(entry));
            return item;
        }));
        open(found.length > 0);
        const many = found.length === 1 ? "1 result" : `${found.length} results`;
        said.textContent = field.value.trim() && many;
        choose(-1);
    }

    field.addEventListener("input", show);
    field.addEventListener("focus", () => field.value && show());
    field.addEventListener("blur", () => setTimeout(open, 200, false)); // a click comes first
    field.addEventListener("keydown", event => {
        const move = {ArrowDown: 1, ArrowUp: -1}[event.key];
        const from = at < 0 && move < 0 ? 0 : at;
        if (move && found.length) choose((from + move + found.length) % found.length);
        else if (event.key === "Enter" && found.length) go(found[Math.max(at, 0)]);
        else if (event.key === "Escape") open(false);
        else return;
        event.preventDefault();
    });
    document.addEventListener("keydown", event => {
        const typing = event.target.closest("input, textarea, select, [contenteditable]");
        if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        field.focus();
    });
    open(false);
    const place = document.querySelector(".search");
    place.append(field, list, said);
    place.hidden = false;

    // The section being read, in the column of contents.
    const column = document.querySelector(".contents.column");
    const links = column ? [...column.querySelectorAll("a")] : [];
    const heads = links.map(link => document.getElementById(link.hash.slice(1)));
    let current = null;

    function mark() {
        const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
        const line = end ? innerHeight : 120;
        const passed = heads.filter(head => head.getBoundingClientRect().top < line);
        const link = links[passed.length - 1];
        if (link === current) return;
        current?.removeAttribute("aria-current");
        link?.setAttribute("aria-current", "true");
        if (link) column.scrollTop = link.offsetTop - column.clientHeight / 2;
        current = link;
    }

    addEventListener("scroll", mark, {passive: true});
    mark();
})();
