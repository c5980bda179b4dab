// The one import of the vendored view library, so that its file name stands in one place.
export {
  Component, createContext, html, render, useCallback, useContext, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState,
} from "../vendor/htm-preact-3.1.1.js";
