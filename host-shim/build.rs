//! Generates the messages from the .proto.

use std::{env, error::Error, fs, path::Path};

const MESSAGES: [&str; 3] = ["cri", "runcoptions", "runtimeoptions"];

fn main() -> Result<(), Box<dyn Error>> {
    let out = env::var("OUT_DIR")?;
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .inputs(MESSAGES.map(|name| format!("proto/{name}.proto")))
        .include("proto")
        .rust_protobuf()
        .rust_protobuf_customize(
            ttrpc_codegen::ProtobufCustomize::default().gen_mod_rs(false).generate_getter(false),
        )
        .run()?;
    for name in MESSAGES {
        // Inner attributes are refused by include!().
        let path = Path::new(&out).join(format!("{name}.rs"));
        let text = fs::read_to_string(&path)?;
        let kept: Vec<&str> =
            text.lines().filter(|line| !line.starts_with("#![") && !line.starts_with("//!")).collect();
        fs::write(&path, kept.join("\n"))?;
        println!("cargo::rerun-if-changed=proto/{name}.proto");
    }
    Ok(())
}
