//! Generates the messages from the .proto.

use std::{env, error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let out = env::var("OUT_DIR")?;
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .inputs(["proto/cri.proto"])
        .include("proto")
        .rust_protobuf()
        .rust_protobuf_customize(
            ttrpc_codegen::ProtobufCustomize::default().gen_mod_rs(false).generate_getter(false),
        )
        .run()?;
    // Inner attributes are refused by include!().
    let path = Path::new(&out).join("cri.rs");
    let text = fs::read_to_string(&path)?;
    let kept: Vec<&str> = text.lines().filter(|l| !l.starts_with("#![") && !l.starts_with("//!")).collect();
    fs::write(&path, kept.join("\n"))?;
    println!("cargo::rerun-if-changed=proto/cri.proto");
    Ok(())
}
