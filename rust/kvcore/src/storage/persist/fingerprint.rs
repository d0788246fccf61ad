//! What must be equal between the cache that saved and the cache that loads.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::clip;

/// Named facts about a cache (model, number format, layout, block size, scales), compared one by one, so that an error
/// can say which of them differs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    /// Without any facts: fits a file that has none.
    pub fn new() -> Self {
        Self::default()
    }

    /// With one more fact; a later value of the same field replaces an earlier one.
    #[must_use]
    pub fn with(mut self, field: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.insert(field.into(), value.into());
        self
    }

    /// Fields and values, sorted by field.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(field, value)| (field.as_str(), value.as_str()))
    }

    /// How a file's fingerprint differs from this one; `None` if it does not. Names the first few fields.
    pub fn difference(&self, file: &Self) -> Option<String> {
        const MOST: usize = 4;
        let fields: std::collections::BTreeSet<&String> = self.0.keys().chain(file.0.keys()).collect();
        let differ: Vec<&String> = fields.into_iter().filter(|&field| self.0.get(field) != file.0.get(field)).collect();
        let told = |value: Option<&String>| value.map_or_else(|| "nothing".to_owned(), |value| clip(value));
        let mut parts: Vec<String> = differ
            .iter()
            .take(MOST)
            .map(|&field| {
                let (expected, found) = (told(self.0.get(field)), told(file.0.get(field)));
                format!("{}: expected {expected}, the file has {found}", clip(field))
            })
            .collect();
        if differ.len() > MOST {
            parts.push(format!("and {} more fields", differ.len() - MOST));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

impl FromIterator<(String, String)> for Fingerprint {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(fields: I) -> Self {
        Self(fields.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_names_fields_and_both_values() {
        let ours = Fingerprint::new().with("dtype", "bfloat16").with("model", "a").with("scales", "1");
        assert_eq!(ours.difference(&ours), None);
        let file = Fingerprint::new().with("dtype", "fp8_e4m3").with("model", "a").with("rope", "x\ny");
        assert_eq!(
            ours.difference(&file).unwrap(),
            "dtype: expected bfloat16, the file has fp8_e4m3; rope: expected nothing, the file has x\\ny; \
             scales: expected 1, the file has nothing"
        );
    }

    #[test]
    fn the_message_stays_short() {
        let file: Fingerprint = (0..1000).map(|i| (format!("{i}").repeat(1000), "v".repeat(100_000))).collect();
        let message = Fingerprint::new().difference(&file).unwrap();
        assert!(message.len() < 1500 && message.ends_with("and 996 more fields"), "{message}");
    }
}
