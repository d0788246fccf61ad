//! `KVGroup`: layers that keep their K and V in the same way.
#![forbid(unsafe_code)]

use kvcore::cache::{GroupKind, GroupSpec};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{of, wrong_type};
use crate::arrays::Size;
use crate::error::invalid;

/// Layers of one kind in a KVCache. See the stub file.
#[pyclass(name = "KVGroup", module = "kvcore._kvcore", frozen, get_all, eq)]
#[derive(Clone, PartialEq)]
pub struct PyKvGroup {
    pub kind: String,
    pub layers: Vec<usize>,
    pub num_kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub v_head_dim: Option<usize>,
    pub window: Option<usize>,
    pub rank: Option<usize>,
    pub rope_dim: Option<usize>,
    pub num_blocks: Option<usize>,
}

/// What a group takes from its cache where it says nothing.
#[derive(Clone, Copy)]
pub struct Defaults {
    pub num_kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub num_blocks: Option<usize>,
}

const KINDS: [&str; 5] = ["full", "sliding_window", "latent", "cross", "none"];

#[pymethods]
impl PyKvGroup {
    #[new]
    #[pyo3(signature = (kind, layers, *, num_kv_heads = None, head_dim = None, v_head_dim = None, window = None,
        rank = None, rope_dim = None, num_blocks = None))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn new(
        #[pyo3(from_py_with = of::kind)] kind: &str,
        layers: &Bound<'_, PyAny>,
        num_kv_heads: Option<Size<'_>>,
        head_dim: Option<Size<'_>>,
        v_head_dim: Option<Size<'_>>,
        window: Option<Size<'_>>,
        rank: Option<Size<'_>>,
        rope_dim: Option<Size<'_>>,
        num_blocks: Option<Size<'_>>,
    ) -> PyResult<Self> {
        if !KINDS.contains(&kind) {
            return Err(invalid(format!("kind: expected one of {}, got {kind:?}", KINDS.join(", "))));
        }
        let size = |name: &str, value: Option<Size<'_>>, kinds: &[&str]| -> PyResult<Option<usize>> {
            let value = value.map(|value| value.get(name)).transpose()?;
            match value {
                Some(got) if !kinds.contains(&kind) => {
                    Err(invalid(format!("{name}: expected none for a group of kind {kind}, got {got}")))
                }
                Some(0) => Err(invalid(format!("{name}: expected at least 1, got 0"))),
                value => Ok(value),
            }
        };
        let heads = ["full", "sliding_window", "cross"];
        let this = Self {
            kind: kind.into(),
            layers: layer_ids(layers)?,
            num_kv_heads: size("num_kv_heads", num_kv_heads, &heads)?,
            head_dim: size("head_dim", head_dim, &heads)?,
            v_head_dim: size("v_head_dim", v_head_dim, &heads)?,
            window: size("window", window, &["sliding_window"])?,
            rank: size("rank", rank, &["latent"])?,
            rope_dim: rope_dim.map(|value| value.get("rope_dim")).transpose()?,
            num_blocks: size("num_blocks", num_blocks, &KINDS[..4])?,
        };
        if this.rope_dim.is_some() && kind != "latent" {
            return Err(invalid(format!("rope_dim: expected none for a group of kind {kind}")));
        }
        let missing = match kind {
            "sliding_window" if this.window.is_none() => Some("window"),
            "latent" if this.rank.is_none() => Some("rank"),
            "latent" if this.rope_dim.is_none() => Some("rope_dim"),
            _ => None,
        };
        match missing {
            Some(name) => Err(invalid(format!("{name}: expected a number for a group of kind {kind}, got none"))),
            None => Ok(this),
        }
    }

    fn __repr__(&self) -> String {
        let mut text = format!("KVGroup('{}', {:?}", self.kind, self.layers);
        let sizes = [
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("v_head_dim", self.v_head_dim),
            ("window", self.window),
            ("rank", self.rank),
            ("rope_dim", self.rope_dim),
            ("num_blocks", self.num_blocks),
        ];
        for (name, value) in sizes {
            if let Some(value) = value {
                text += &format!(", {name}={value}");
            }
        }
        text + ")"
    }
}

impl PyKvGroup {
    /// The one group of a cache whose layers are all alike.
    pub fn whole(num_layers: Option<usize>, defaults: Defaults) -> PyResult<Self> {
        let needed = [
            ("num_layers", num_layers),
            ("num_kv_heads", defaults.num_kv_heads),
            ("head_dim", defaults.head_dim),
            ("num_blocks", defaults.num_blocks),
        ];
        if let Some((name, _)) = needed.iter().find(|(_, value)| value.is_none()) {
            return Err(PyTypeError::new_err(format!("{name}: expected an integer (or groups beside it), got None")));
        }
        let num_layers = num_layers.unwrap_or(0);
        if num_layers == 0 || num_layers > 1 << 16 {
            return Err(invalid(format!("num_layers: expected 1 to {}, got {num_layers}", 1 << 16)));
        }
        Ok(Self {
            kind: "full".into(),
            layers: (0..num_layers).collect(),
            num_kv_heads: defaults.num_kv_heads,
            head_dim: defaults.head_dim,
            v_head_dim: None,
            window: None,
            rank: None,
            rope_dim: None,
            num_blocks: defaults.num_blocks,
        })
    }

    /// Groups as the argument of a cache gives them: a sequence of groups, or of dicts of a group's arguments.
    pub fn list(groups: &Bound<'_, PyAny>) -> PyResult<Vec<Self>> {
        let wrong = |got: &Bound<'_, PyAny>| wrong_type("groups", "a list of KVGroup", got);
        let (mut list, mut num_layers) = (Vec::new(), 0);
        for item in groups.try_iter().map_err(|_| wrong(groups))? {
            let item = item?;
            let group = match item.cast::<Self>() {
                Ok(group) => group.clone(),
                Err(_) => {
                    let arguments = item.cast::<PyDict>().map_err(|_| wrong(&item))?;
                    let made = item.py().get_type::<Self>().call((), Some(arguments))?;
                    made.cast_into::<Self>().map_err(|_| wrong(&item))?
                }
            };
            // Each layer is in one group, so this bounds the groups of an iterator that never ends, too.
            num_layers += group.get().layers.len();
            if num_layers > MAX_LAYERS {
                return Err(invalid(format!("groups: expected at most {MAX_LAYERS} layers in all of them, got more")));
            }
            list.push(group.get().clone());
        }
        Ok(list)
    }

    /// The group with everything that it left to its cache filled in.
    pub fn spec(&self, index: usize, defaults: Defaults) -> PyResult<GroupSpec> {
        let need = |name: &str, own: Option<usize>, default: Option<usize>| {
            own.or(default).ok_or_else(|| {
                invalid(format!("groups[{index}]: {name}: expected a number here or for the cache, got neither"))
            })
        };
        let heads = |spec: GroupKind| -> PyResult<GroupSpec> {
            let head_dim = need("head_dim", self.head_dim, defaults.head_dim)?;
            Ok(GroupSpec {
                kind: spec,
                layers: self.layers.clone(),
                num_kv_heads: need("num_kv_heads", self.num_kv_heads, defaults.num_kv_heads)?,
                head_dim,
                v_head_dim: self.v_head_dim.unwrap_or(head_dim),
                num_blocks: need("num_blocks", self.num_blocks, defaults.num_blocks)?,
                scales: None,
            })
        };
        match (self.kind.as_str(), self.window, self.rank, self.rope_dim) {
            ("sliding_window", Some(window), ..) => heads(GroupKind::SlidingWindow { window }),
            ("latent", _, Some(rank), Some(rope_dim)) => Ok(GroupSpec {
                kind: GroupKind::Latent { rank, rope_dim },
                layers: self.layers.clone(),
                num_kv_heads: 1,
                head_dim: rank.saturating_add(rope_dim),
                v_head_dim: rank,
                num_blocks: need("num_blocks", self.num_blocks, defaults.num_blocks)?,
                scales: None,
            }),
            ("cross", ..) => heads(GroupKind::Cross),
            ("none", ..) => Ok(GroupSpec {
                kind: GroupKind::None,
                layers: self.layers.clone(),
                num_kv_heads: 0,
                head_dim: 0,
                v_head_dim: 0,
                num_blocks: 0,
                scales: None,
            }),
            _ => heads(GroupKind::Full),
        }
    }
}

fn layer_ids(layers: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let items = layers.try_iter().map_err(|_| wrong_type("layers", "a sequence of integers", layers))?;
    let mut ids = Vec::new();
    for item in items {
        let id = item?.extract::<Size<'_>>().unwrap_or_else(|never| match never {}).get("layers")?;
        if ids.len() >= MAX_LAYERS || id >= MAX_LAYERS {
            return Err(invalid(format!("layers: expected fewer than {MAX_LAYERS}, got layer {id}")));
        }
        ids.push(id);
    }
    if ids.is_empty() {
        return Err(invalid("layers: expected at least one, got none".into()));
    }
    Ok(ids)
}

/// No model has as many.
const MAX_LAYERS: usize = 1 << 16;
