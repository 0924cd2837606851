//! The fields of the OCI runtime spec, read from the sources of the crate oci-spec.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use syn::{Attribute, Fields, GenericArgument, Item, ItemStruct, PathArguments, Type};

/// What oci-spec has, and the runtime-spec does not: two fields that are deprecated because they never existed.
const NOT_IN_THE_SPEC: [&str; 2] = ["uidMappings", "gidMappings"];

/// The version of oci-spec that the workspace uses, and the directory of its sources.
pub(super) fn of_oci_spec() -> &'static (String, PathBuf) {
    static FOUND: OnceLock<(String, PathBuf)> = OnceLock::new();
    FOUND.get_or_init(find)
}

fn find() -> (String, PathBuf) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let metadata = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        // Packages of other systems need not be there.
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let package = packages.iter().find(|package| package["name"] == "oci-spec").unwrap();
    let manifest = PathBuf::from(package["manifest_path"].as_str().unwrap());
    (package["version"].as_str().unwrap().to_owned(), manifest.with_file_name("src").join("runtime"))
}

/// The paths of all fields of a spec, as JSON names them. Each element of a list is `[]`, and each value of a map `*`.
/// `ends` says of which fields the fields within are not wanted.
pub(super) fn fields(ends: impl Fn(&str) -> bool) -> Vec<String> {
    let mut structs = BTreeMap::new();
    let (_, directory) = of_oci_spec();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let file = syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap();
            for item in file.items {
                if let Item::Struct(item) = item {
                    structs.insert(item.ident.to_string(), item);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(&structs, &structs["Spec"], "", &ends, &mut found);
    found.retain(|name| {
        !NOT_IN_THE_SPEC.iter().any(|absent| name == absent || name.starts_with(&format!("{absent}[")))
    });
    found
}

fn walk(
    structs: &BTreeMap<String, ItemStruct>,
    item: &ItemStruct,
    before: &str,
    ends: &impl Fn(&str) -> bool,
    found: &mut Vec<String>,
) {
    let Fields::Named(fields) = &item.fields else { panic!("{} has no names for its fields", item.ident) };
    let is_camel = word_of(&item.attrs, "rename_all").is_some_and(|case| case == "camelCase");
    for field in &fields.named {
        let ident = field.ident.as_ref().unwrap().to_string();
        let plain = if is_camel { camel(&ident) } else { ident };
        let name = format!("{before}{}", word_of(&field.attrs, "rename").unwrap_or(plain));
        let (type_name, suffix) = innermost(&field.ty);
        match structs.get(&type_name) {
            Some(inner) if !ends(&name) => walk(structs, inner, &format!("{name}{suffix}."), ends, found),
            _ => found.push(name),
        }
    }
}

/// The value of a word in serde's attributes.
fn word_of(attributes: &[Attribute], word: &str) -> Option<String> {
    let serde = attributes.iter().filter(|attribute| attribute.path().is_ident("serde"));
    serde.filter_map(|attribute| attribute.meta.require_list().ok()).find_map(|list| {
        let text = list.tokens.to_string();
        let words = text.split(',').filter_map(|part| part.split_once('='));
        let value = words.into_iter().find(|(key, _)| key.trim() == word)?.1;
        Some(value.trim().trim_matches('"').to_owned())
    })
}

fn camel(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |text, word| text + &word[..1].to_uppercase() + &word[1..])
}

/// The type within options, lists and maps, and what the path of a field within has for them.
fn innermost(outer: &Type) -> (String, String) {
    let Type::Path(path) = outer else { panic!("a field of a type that is no path") };
    let last = path.path.segments.last().unwrap();
    let PathArguments::AngleBracketed(arguments) = &last.arguments else {
        return (last.ident.to_string(), String::new());
    };
    let Some(GenericArgument::Type(inner)) = arguments.args.last() else {
        panic!("no type in {}", last.ident)
    };
    let suffix = match last.ident.to_string().as_str() {
        "Option" => "",
        "Vec" | "HashSet" => "[]",
        "HashMap" => ".*",
        other => panic!("a field in a {other}"),
    };
    let (name, below) = innermost(inner);
    (name, format!("{suffix}{below}"))
}
