"""SGLang's own route, /generate."""
