//! Policy: when to admit, purge, unload and shed. Knows neither heap nor arena, only traits.
